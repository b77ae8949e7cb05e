"""Folders that other programs have quantised, read as floats."""
