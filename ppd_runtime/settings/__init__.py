"""Settings of a runtime, their checks, and the two layouts."""
