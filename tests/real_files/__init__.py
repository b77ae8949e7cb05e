"""Files and requests as other programs write them, made by those programs."""
