"""FLOP formulas and their coefficients."""
