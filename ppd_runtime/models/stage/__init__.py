"""A range of layers that any process can run piece by piece, over caches of its own."""
