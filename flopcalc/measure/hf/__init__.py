"""Hugging Face models: built, run and compared."""
