"""The staged layout: each layer in one place, a tree of tokens in flight."""
