"""Fits a model's guesses to its own texts: answers, kept states, heads trained side by side, a report."""
