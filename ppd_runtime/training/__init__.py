"""Training recipes, one a file."""
