"""Measurements that others can repeat: `python -m benchmarks.NAME`."""
