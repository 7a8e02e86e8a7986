"""Steps traced: polynomials, operators and recorded truth."""
