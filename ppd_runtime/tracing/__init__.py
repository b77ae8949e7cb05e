"""Where a request's time went: spans, their recorder, traces and timelines."""
