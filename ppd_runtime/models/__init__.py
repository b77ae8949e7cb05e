"""What a model is here: layer ranges of a Hugging Face decoder, their caches and their exit heads."""
