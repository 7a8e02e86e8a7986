"""A bound model and a workload become an Estimate."""
