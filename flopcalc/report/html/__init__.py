"""Results as self-contained HTML pages: pure functions from the values that --json prints to text."""
