"""A GPU measured into a predictor."""
