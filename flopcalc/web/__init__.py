"""The page: the exact calculator in a browser, and what builds and serves it."""
