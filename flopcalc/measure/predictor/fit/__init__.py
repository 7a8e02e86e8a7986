"""The fit of a predictor: measured steps and calls go in, the constants of one device come out."""
