"""The version, in one place; a plain string so that reading it imports nothing."""

__version__ = "0.2.0"
