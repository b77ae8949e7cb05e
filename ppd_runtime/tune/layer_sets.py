"""Runs SWIFT's search to its end over prompts, as Self-SD does before decoding."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ppd_runtime.methods.layer_search import LayerSearch
from ppd_runtime.methods.registry import open_method
from ppd_runtime.methods.swift import Swift
from ppd_runtime.models.trained.layer_sets import write_layer_set


def find_layer_set(
    out: Path,
    model: str,
    prompts: Sequence[str],
    max_new_tokens: int = 128,
    on_progress: Callable[[LayerSearch], None] = lambda _: None,
    **settings: Any,
) -> LayerSearch:
    """Continue the prompts, again and again, until the search has ended, and write the best set to a file.

    `settings` are those of the method "swift"; see `SwiftSettings`.

    Raises:
        ValueError: for settings that cannot work, and where the prompts' continuations are too short to search with.
    """
    with open_method(model, "swift", **settings) as generator:
        method = generator.method  # type: ignore[attr-defined]
        assert isinstance(method, Swift)
        if (search := method.search) is None:
            raise ValueError("layer_set names what is being searched for; leave it out")
        encoded = generator.encoded(prompts)
        for number in itertools.count():
            if search.finished:
                break
            before = search.steps
            for prompt in encoded:
                if not search.finished:
                    generator.generate(prompt, max_new_tokens=max_new_tokens, seed=number)
                    on_progress(search)
            if search.steps == before and not search.finished:
                raise ValueError(f"no prompt's continuation has more than the {method.window} tokens to score sets by")
        found = {name: getattr(search, name) for name in ("skip_ratio", "matchness", "windows", "steps")}
        found["matchness"] = search.matchness if search.steps else None
        write_layer_set(out, search.best, generator.info, found)
    return search
