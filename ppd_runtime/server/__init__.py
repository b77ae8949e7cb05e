"""An OpenAI-compatible HTTP server over any way of decoding."""
