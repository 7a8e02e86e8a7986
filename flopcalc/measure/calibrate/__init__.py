"""A GPU measured into tables."""
