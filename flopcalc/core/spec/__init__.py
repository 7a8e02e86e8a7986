"""The language of model specs."""
