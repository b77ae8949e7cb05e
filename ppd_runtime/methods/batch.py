"""Several requests of one call: lists of prompts, and several texts for one prompt."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Protocol

from transformers import BatchEncoding

from ppd_runtime.checks import check_int
from ppd_runtime.methods.prompts import Prompt
from ppd_runtime.sampling_params import SamplingParams

_MOST_TEXTS = 1024
_SEEDS = 2**64


class Cancellable(Protocol):
    """A generation, as far as it matters here."""

    def __iter__(self) -> Any: ...

    def cancel(self) -> None:
        """End within a token."""


def several_prompts(prompt: object, n: int | None) -> list[Prompt]:
    """The prompts in a list of texts, of encodings, or of two lists of token ids at least; none for a single prompt.

    One list of token ids within a list is one prompt, as a tensor `[1, tokens]` is.

    Raises:
        ValueError: for texts mixed with other things, and for `n` with several prompts.
    """
    if not isinstance(prompt, list | tuple) or not prompt:
        return []
    if any(isinstance(one, str) for one in prompt):
        for index, one in enumerate(prompt):
            if not isinstance(one, str):
                raise ValueError(
                    f"prompt {index + 1} of {len(prompt)} is {one!r:.200}: give a list of texts, or one prompt"
                )
    elif not all(isinstance(one, BatchEncoding) for one in prompt) and not (
        len(prompt) > 1 and all(isinstance(one, list | tuple) for one in prompt)
    ):
        return []
    if n is not None:
        raise ValueError(f"n={n} with {len(prompt)} prompts: give one prompt, or leave n out")
    return list(prompt)


def with_seeds(params: SamplingParams, n: int | None) -> list[SamplingParams]:
    """The settings of `n` texts: each further one has the next seed; None is one text."""
    if n is None:
        return [params]
    check_int("n", n, 1, _MOST_TEXTS)
    params = params.settled()
    return [replace(params, seed=(params.seed + choice) % _SEEDS) for choice in range(n)]


def exhaust_all(requests: Sequence[Cancellable], at_once: int) -> None:
    """Run every request to its end, as `as_they_end` does."""
    for _ in as_they_end(requests, at_once):
        pass


def as_they_end(requests: Sequence[Cancellable], at_once: int) -> Iterator[int]:
    """Run every request, `at_once` at a time, and give each one's number when it has ended.

    If one fails, or Ctrl-C comes, the others are cancelled.
    """
    if at_once == 1 or len(requests) == 1:
        for number, request in enumerate(requests):
            exhaust(request)
            yield number
        return
    with ThreadPoolExecutor(min(at_once, len(requests)), "ppd-request") as pool:
        numbers = {pool.submit(exhaust, request): number for number, request in enumerate(requests)}
        try:
            for ended in as_completed(numbers):
                ended.result()
                yield numbers[ended]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for request in requests:
                request.cancel()
            raise


def exhaust(events: Iterable[object]) -> None:
    """Run it to its end."""
    for _ in events:
        pass
