"""A request from the caller's side: its tokens in order, its early end, and when workers may be closed."""
