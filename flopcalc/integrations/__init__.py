"""Adapters: one small file for each training framework replaces its FLOP counter; `launch` reads its launch files."""
