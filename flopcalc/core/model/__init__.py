"""A config and its spec become stages of operations."""
