"""What every room may import: errors, words, units, values, files and where data is."""
