"""The profiling sweep: a matrix of trainers, sizes and models in; one measured row a configuration out."""
