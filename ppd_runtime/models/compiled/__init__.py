"""Layers compiled ahead of time, and passes through them."""
