"""Every way of decoding in one process, and what all ways share."""
