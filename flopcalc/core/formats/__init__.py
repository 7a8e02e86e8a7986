"""In which number format each product is computed and each weight is stored."""
