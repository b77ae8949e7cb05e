"""Workers on Ray: where they go, how they start, and what Ray is told of them."""
