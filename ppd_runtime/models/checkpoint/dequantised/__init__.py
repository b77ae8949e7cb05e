"""Folders that other programs have quantised, read as floats, or with their few bits."""
