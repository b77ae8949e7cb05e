"""GGUF files as models: read within bounds, and written once as folders that open like any other."""
