"""Independent counters of a running step."""
