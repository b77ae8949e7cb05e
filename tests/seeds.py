"""What chance decides in tests: the same in every run, and other things in the night, which prints its seed."""

import os

SEED = int(os.environ.get("PPD_SEED", "1"))
"""Of everything that is drawn; give the one that `make nightly` printed to have the same again."""
