"""Ten thousand inputs for whatever takes bytes from strangers; `python -m fuzz.run` runs as many as one likes."""

import contextlib
import logging
from collections.abc import Iterator

import pytest
from fuzz.inputs import CORPUS, corpus, mutations
from fuzz.make_corpus import MESSAGES, REFUSED, on_the_stream, refusal
from fuzz.targets import TARGETS, decoding, frames_of, read_stream
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_runtime.pipeline import tensors
from ppd_runtime.pipeline.wire import KIND_NAMES, WireError, decode

BATCH, BATCHES = 20, {"decoding": 225, "stream": 150, "ring": 50, "round_trip": 75}
"""Ten thousand in all."""


@pytest.fixture(autouse=True)
def _no_line_for_each_input() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", TARGETS)
def test_stored_inputs_keep_the_promises(target: str) -> None:
    for data in corpus(target):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_inputs_keep_the_promises(target: str) -> None:
    @settings(max_examples=BATCHES[target], derandomize=True, deadline=None, database=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        for data in mutations(target, seed, BATCH):
            try:
                TARGETS[target](data)
            except Exception as error:
                raise AssertionError(f"{target} of {data!r}") from error

    check()


def test_the_corpus_holds_every_kind_of_message_of_this_wire_version() -> None:
    """Where this fails, the wire format has changed: run `python -m fuzz.make_corpus`."""
    stored = set()
    for data in corpus("decoding"):
        with contextlib.suppress(WireError):
            stored.add(type(decode(frames_of(data))).__name__)
    assert stored == set(KIND_NAMES)
    whole, alive = read_stream([b"".join(map(on_the_stream, MESSAGES))])
    assert [type(message) for message in whole] == [type(message) for message in MESSAGES]
    assert alive


def test_each_stored_refusal_has_a_reason_of_its_own() -> None:
    """Of another wire version they would all be refused for that."""
    reasons = [refusal(path.read_bytes()) for path in (CORPUS / "decoding").glob(f"{REFUSED}-*")]
    assert len(reasons) > 12
    assert None not in reasons
    assert len(set(reasons)) == len(reasons)


def test_a_broken_decoder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs reach deep enough to notice a check that is missing: here that a tensor's bytes fit its shape."""
    tensors.arriving.cache_clear()
    monkeypatch.setattr(tensors.math, "prod", lambda _: 8)
    try:
        with pytest.raises(Exception, match=r"shape|size"):
            for data in mutations("decoding", 0, 20_000):
                decoding(data)
    finally:
        tensors.arriving.cache_clear()
        tensors.outgoing.cache_clear()
