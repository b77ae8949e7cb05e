"""Layouts and methods by short names: threads of this process, and one process alone."""

from typing import Any

PROMPT, LOCAL = [5, 9, 200, 31], {"transport": "local", "speculation": "always"}
"""A prompt, and what has workers be threads that guess at all times."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "running ahead": {"k": 1, "run_ahead": True, **LOCAL},
    "k=2": {"k": 2, "run_ahead": False, **LOCAL},
    "stages of rows": {"stages": 2, "k": 2, "rows": 4, **LOCAL},
    "one stage": {"stages": 1, "rows": 4, **LOCAL},
    "three stages": {"stages": 3, "k": 2, "rows": 1, **LOCAL},
}
METHODS: dict[str, dict[str, Any]] = {
    "layerskip": {"method": "layerskip"},
    "adaspeed": {"method": "adaspeed"},
    "swift": {"method": "swift"},
    "rejection sampling": {"method": "layerskip", "acceptance": "rejection"},
}
WAYS = {"ordinary": {"method": "autoregressive"}, **LAYOUTS, **METHODS}
"""All of them, ordinary decoding first."""
