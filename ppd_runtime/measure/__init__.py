"""Measurements on real text: how often an early exit already knows the next token, and methods beside each other."""
