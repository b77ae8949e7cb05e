"""The first hour with a GPU, in ten minutes: `python -m benchmarks.gpu --out DIR`."""
