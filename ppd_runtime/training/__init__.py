"""Training recipes, and what they share."""
