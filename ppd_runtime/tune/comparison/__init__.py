"""Every way of decoding beside ordinary decoding, on the same prompts, in turn."""
