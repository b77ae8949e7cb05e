"""Several requests of one call: lists of prompts, and several texts for one prompt."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from ppd_runtime.checks import check_int
from ppd_runtime.sampling_params import SamplingParams

_MOST_TEXTS = 1024
_SEEDS = 2**64


class Cancellable(Protocol):
    """A generation, as far as it matters here."""

    def __iter__(self) -> Any: ...

    def cancel(self) -> None:
        """Have it end within a token."""


def several_prompts(prompt: object, n: int | None) -> list[str]:
    """The prompts where a list of texts was given; none where it is one prompt.

    Raises:
        ValueError: for texts among other things, and for several texts of several prompts.
    """
    if not isinstance(prompt, list | tuple) or not any(isinstance(text, str) for text in prompt):
        return []
    for index, text in enumerate(prompt):
        if not isinstance(text, str):
            raise ValueError(
                f"prompt {index + 1} of {len(prompt)} is {text!r:.200}: give a list of texts, or one prompt"
            )
    if n is not None:
        raise ValueError(f"n={n} with {len(prompt)} prompts: give one prompt, or leave n out")
    return list(prompt)


def with_seeds(params: SamplingParams, n: int | None) -> list[SamplingParams]:
    """The settings of `n` texts: each further one has the next seed; None is one text."""
    if n is None:
        return [params]
    check_int("n", n, 1, _MOST_TEXTS)
    return [replace(params, seed=(params.seed + choice) % _SEEDS) for choice in range(n)]


def exhaust_all(requests: Sequence[Cancellable], at_once: int) -> None:
    """Run every request to its end, `at_once` at a time; where one fails, or Ctrl-C comes, the others are cancelled."""
    if at_once == 1 or len(requests) == 1:
        for request in requests:
            exhaust(request)
        return
    with ThreadPoolExecutor(min(at_once, len(requests)), "ppd-request") as pool:
        try:
            for _ in pool.map(exhaust, requests):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for request in requests:
                request.cancel()
            raise


def exhaust(events: Iterable[object]) -> None:
    """Run it to its end."""
    for _ in events:
        pass
