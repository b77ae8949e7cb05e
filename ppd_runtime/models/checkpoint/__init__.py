"""A model's files: found, checked, described, and loaded layer by layer."""
