"""Decoding algorithms that run in one process."""
