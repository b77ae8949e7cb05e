"""This machine and this model, measured: layouts, match rates, and methods beside each other."""
