"""Several prompts in one call."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import BatchEncoding

from ppd_runtime.methods.prompts import Prompt
from ppd_runtime.results import GenerationResult


def prompts_in(given: Any) -> Sequence[Prompt] | None:
    """The prompts that a list or a tuple holds: texts, encodings, or two lists of token ids at least; else None.

    One list of token ids within a list is one prompt, as a tensor `[1, tokens]` is.
    """
    if not isinstance(given, list | tuple) or not given:
        return None
    if all(isinstance(item, str | BatchEncoding) for item in given):
        return given
    return given if len(given) > 1 and all(isinstance(item, list | tuple) for item in given) else None


def in_order(
    run: Callable[[list[int]], GenerationResult], prompts: Sequence[list[int]], at_once: int
) -> list[GenerationResult]:
    """The result of each prompt, in the order given, so many at once."""
    if at_once == 1:
        return [run(prompt) for prompt in prompts]
    pool = ThreadPoolExecutor(min(at_once, len(prompts)))
    try:
        return list(pool.map(run, prompts))
    finally:
        pool.shutdown(cancel_futures=True)  # where one has failed, those that have not begun are not wanted
