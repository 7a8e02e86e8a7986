"""Blind rounds: predictions that are committed before anything is measured, and what was measured then."""
