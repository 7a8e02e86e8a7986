"""Estimates, predictions and plans as tables, JSON, CSV, Markdown and HTML."""
