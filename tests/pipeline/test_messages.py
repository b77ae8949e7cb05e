"""The wire format: every message survives the journey, and no bytes whatever do more than raise a WireError."""

import contextlib
import dataclasses
import math
import sys
import time
import tracemalloc
from array import array
from dataclasses import replace
from itertools import cycle, islice
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Meta, msgpack
from torch import Tensor

from ppd_runtime.pipeline import tensors as wire_tensors
from ppd_runtime.pipeline.messages import (
    Begin,
    Cancel,
    Candidate,
    CatchUp,
    End,
    Entries,
    ExitState,
    Failed,
    Finished,
    Foreseen,
    Guesses,
    HeadStart,
    LinkNote,
    Message,
    Missing,
    Peers,
    PromptStates,
    Refused,
    Report,
    Rows,
    Shutdown,
    Spans,
    TensorAnnouncement,
    Token,
    Tokens,
    Unreadable,
)
from ppd_runtime.pipeline.wire import WireError, decode, encode, received, split
from ppd_runtime.results import PathStats
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.tracing.breakdown import LatencyBreakdown

KINDS = (
    Begin,
    ExitState,
    Candidate,
    HeadStart,
    Token,
    Entries,
    End,
    Cancel,
    Finished,
    Report,
    Failed,
    Shutdown,
    Spans,
    CatchUp,
    Missing,
    Peers,
    LinkNote,
    TensorAnnouncement,
    Tokens,
    PromptStates,
    Rows,
    Guesses,
    Foreseen,
    Refused,
)
"""In the order of their numbers on the wire."""

VERSION = 21
BREAKDOWN = LatencyBreakdown(1.0, 2.0, 3.0, 4.0, 5.0)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

small_settings = settings(max_examples=75, derandomize=True, deadline=None)
any_number = st.integers(-(2**63), 2**64 - 1)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=50)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bit patterns, NaNs and infinities among them, of up to six dimensions."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 3), max_size=6))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    return torch.frombuffer(data, dtype=dtype).view(shape)


def whole(high: int, low: int = 0) -> st.SearchStrategy[int]:
    """Whole numbers of a range, its ends among them."""
    return st.integers(low, high) | st.sampled_from([low, high])


seconds = st.floats(0, sys.float_info.max)
breakdowns = st.builds(LatencyBreakdown, *[st.floats(allow_nan=False, allow_infinity=False)] * 5)
path_stats = st.builds(
    PathStats,
    seconds,
    seconds,
    seconds,
    *[whole(2**63 - 1)] * 3,
    breakdowns,
    breakdowns,
    whole(2**63 - 1),
    whole(2**63 - 1),
    st.lists(seconds, max_size=3).map(tuple),
)
some_tokens = st.lists(whole(2**31 - 1), max_size=20).map(tuple)
sampling = st.builds(
    SamplingParams,
    max_new_tokens=whole(2**31 - 1, 1),
    temperature=st.just(0.0) | st.floats(1e-6, sys.float_info.max),
    top_k=st.none() | whole(2**31 - 1),
    top_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(0, sys.float_info.max, exclude_min=True),
    seed=whole(2**64 - 1),
    stop=st.lists(texts.filter(bool), max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    min_p=st.none() | st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    stop_token_ids=st.lists(whole(2**31 - 1), max_size=20).map(tuple),
    num_generated=whole(2**31 - 1),
    logprobs=st.none() | whole(20),
    eos_token_ids=st.lists(whole(2**31 - 1), max_size=20).map(tuple),
    logit_bias=st.none() | st.dictionaries(whole(2**31 - 1), st.floats(-100, 100), max_size=20),
    min_new_tokens=st.none() | whole(2**31 - 1),
    min_length=st.none() | whole(2**31 - 1),
    no_repeat_ngram_size=st.none() | whole(100),
    bad_words_ids=st.none() | st.lists(some_tokens.filter(bool), max_size=5).map(tuple),
    sequence_bias=st.none() | st.dictionaries(some_tokens.filter(bool), st.floats(-1e30, 1e30), max_size=5),
    suppress_tokens=st.none() | some_tokens,
    begin_suppress_tokens=st.none() | some_tokens,
    forced_bos_token_id=st.none() | whole(2**31 - 1),
    forced_eos_token_id=st.none() | some_tokens,
    exponential_decay_length_penalty=st.none() | st.tuples(whole(2**31 - 1), st.floats(1e-9, 1e9)),
    encoder_repetition_penalty=st.none() | st.floats(0, sys.float_info.max, exclude_min=True),
    encoder_no_repeat_ngram_size=st.none() | whole(100),
    renormalize_logits=st.none() | st.booleans(),
)
FORMS = ({}, {"schema": '{"type": "string"}'}, {"regex": "[aé]+"}, {"choice": ("a", "é")}, {"grammar": 'start: "a"'})
sampling = st.one_of(
    sampling,
    st.builds(lambda params, form: replace(params, ignore_eos=False, **form), sampling, st.sampled_from(FORMS)),
)
STRATEGIES = {
    bool: st.booleans(),
    str: texts,
    SamplingParams: sampling,
    PathStats: path_stats,
    Tensor: tensors(),
    Tensor | None: st.none() | tensors(),
}


def within(base: object, bounds: Meta) -> st.SearchStrategy[object]:
    """Every value that is let through, the least and the greatest among them."""
    if base is bytes:
        return st.binary(max_size=50)
    if base is str:
        return texts
    if base is float:
        return st.floats(bounds.ge, bounds.le)
    if base is int:
        return whole(bounds.le, bounds.ge)
    lists = st.lists(strategy(get_args(base)[0]), max_size=20)
    return lists if get_origin(base) is list else lists.map(tuple)


def strategy(hint: object) -> st.SearchStrategy[object]:
    return within(*get_args(hint)) if get_origin(hint) is Annotated else STRATEGIES[hint]


def field_types(kind: type[Message]) -> list[object]:
    hints = get_type_hints(kind, include_extras=True)
    return [hints[field.name] for field in dataclasses.fields(kind)]


def base_type(hint: object) -> object:
    """The field's type without its bounds, nor its members'."""
    if get_origin(hint) is Annotated:
        return base_type(get_args(hint)[0])
    if get_origin(hint) in (list, tuple):
        return get_origin(hint)[tuple(map(base_type, get_args(hint)))]
    return hint


def agree(message: Message) -> bool:
    """Whether the message's fields can be one message's."""
    if isinstance(message, Begin):
        return len(message.delivered) <= message.params.max_new_tokens
    if isinstance(message, CatchUp) and message.entries is not None:
        return message.entries.dim() > 0 and len(message.entries) <= len(message.token_ids)
    if isinstance(message, Tokens):
        return len(message.token_ids) == len(message.winners)
    if isinstance(message, Rows):
        return len(message.nodes) == len(message.parents) == len(message.positions) == len(message.token_ids)
    if isinstance(message, Guesses):
        told, size = len(message.nodes), len(message.token_ids)
        return size == len(message.chances) and (size % told == 0 if told else not size)
    return not isinstance(message, Peers) or len(message.addresses) == len(message.locations)


def of_kind(kind: type[Message]) -> st.SearchStrategy[Message]:
    found = st.builds(kind, *map(strategy, field_types(kind)))
    if kind is Rows:
        found = found.map(lambda rows: dataclasses.replace(rows, **cut(rows, len(rows.nodes))))
    if kind is Guesses:
        found = found.map(lambda named: dataclasses.replace(named, **cut(named, len(named.nodes) and 2)))
    return found.filter(agree)


def cut(message: Message, size: int) -> dict[str, tuple[int, ...]]:
    """The message's tuples with so many members, some of them again and again."""
    tuples = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return {
        name: tuple(islice(cycle(values or (0,)), size)) for name, values in tuples.items() if isinstance(values, tuple)
    }


any_message = st.one_of([of_kind(kind) for kind in KINDS])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


def assert_same_message(a: Message, b: Message) -> None:
    assert type(a) is type(b)
    for field in dataclasses.fields(a):
        assert same(getattr(a, field.name), getattr(b, field.name)), field.name


def on_the_wire(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


def described(*numbers: int) -> bytes:
    """A tensor's description: the number of its dtype, then its shape."""
    return array("q", numbers).tobytes()


def head(*fields: object) -> bytes:
    return msgpack.encode(list(fields))


SENT = [
    field.name for field in dataclasses.fields(SamplingParams) if field.name not in ("timeout_s", "logits_processors")
]


def begin_header(**changes: object) -> bytes:
    """A good request's header, but for some fields."""
    version, kind, *values = head_of(Begin(-1, 1, [1], SamplingParams(1), live=False))
    fields = dict(zip([field.name for field in dataclasses.fields(Begin)], values, strict=True))
    params = dict(zip(SENT, fields["params"], strict=True))
    params |= {name: value for name, value in changes.items() if name in params}
    fields |= {"params": list(params.values())} | {name: value for name, value in changes.items() if name not in params}
    return head(version, kind, *fields.values())


@pytest.mark.parametrize("kind", KINDS)
def test_messages_survive_the_journey(kind: type[Message]) -> None:
    @small_settings
    @given(of_kind(kind))
    def check(message: Message) -> None:
        frames = on_the_wire(message)
        assert_same_message(decode(frames), message)
        assert_same_message(decode([memoryview(frame) for frame in frames]), message)
        values = [getattr(message, field.name) for field in dataclasses.fields(message)]
        assert len(frames) == 1 + sum(isinstance(value, Tensor) for value in values)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_on_the_wire_stay_what_they_are(kind: type[Message]) -> None:
    """Moving a number, or a field, needs a new wire version."""
    values = {
        int: 5,
        float: 0.5,
        bool: True,
        str: "a",
        bytes: b"ab",
        list[int]: [1, -1] if kind is Spans else [1, 2],
        tuple[int, ...]: (3, 4),
        tuple[float, ...]: (-0.5, -2.0),
        list[str]: ["b", "c"],
        Tensor: torch.ones(2),
        Tensor | None: torch.ones(2),
        SamplingParams: SamplingParams(
            *(7, 0.5, 3, 0.75, 1.5, 9, ("a",), True, 0.25, 1.0, -1.0, (8,), None, (), 6, 3, True, (5,)),
            *({5: 2}, 1, 2, 3, [[4, 5]], {(6,): 1}, [7], [8], 9, 10, (11, 1.5), 1.25, 12, True),
        ),
        PathStats: PathStats(1.5, 0.5, 0.25, 12, 3, 5, BREAKDOWN, BREAKDOWN, 8, 6, (0.25, 0.0), True),
    }
    in_header = values | {
        Tensor: described(0, 2),
        Tensor | None: described(0, 2),
        SamplingParams: [
            *(7, 0.5, 3, 0.75, 1.5, 9, ["a"], True, 0.25, 1.0, -1.0, [8], 6, 3, True, [5], [[5, 2.0]], 1, 2, 3),
            *([[4, 5]], [[[6], 1.0]], [7], [8], 9, [10], [11, 1.5], 1.25, 12, True, None, None, None, None),
        ],
        PathStats: [1.5, 0.5, 0.25, 12, 3, 5, *([1.0, 2.0, 3.0, 4.0, 5.0],) * 2, 8, 6, [0.25, 0.0], True],
    }
    types = [base_type(hint) for hint in field_types(kind)]
    frames = on_the_wire(kind(*(values[wanted] for wanted in types)))
    assert frames[0] == head(VERSION, KINDS.index(kind), *(in_header[wanted] for wanted in types))
    assert all(frame == b"\x00\x00\x80\x3f" * 2 for frame in frames[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_layout_travel(dtype: torch.dtype) -> None:
    base = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        inference = base + 1
    for tensor in (
        base.transpose(0, 2),
        base[:, ::2, 3:5],
        base[1],
        base[0, 0, 0],
        base[:1].expand(5, 6, 8),
        inference[:, -1:],
        base.clone().requires_grad_(),
    ):
        arrived = decode(on_the_wire(ExitState(0, 1, 2, tensor)))
        assert same_bits(arrived.hidden, tensor.detach().contiguous())


def test_a_decoded_tensor_is_a_copy_that_can_be_written() -> None:
    frames = [bytearray(frame) for frame in encode(ExitState(0, 1, 2, torch.ones(1, 1, 4)))]
    arrived = decode(frames).hidden
    frames[1][:] = bytes(16)
    arrived += 1
    assert arrived.tolist() == [[[2.0] * 4]]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2**64 - 1},
        {"max_new_tokens": 2**64},
        {"top_k": 2**64},
        {"stop": ("x" * (2**16 + 1),)},
        {"stop": ("\ud800",)},
        {"stop": ("€" * 2**16,)},
        {"stop": ("x",) * 1001},
        {"temperature": 1e300},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"stop_token_ids": (0, 2**31 - 1)},
        {"stop_token_ids": (2**31,)},
        {"stop_token_ids": (1,) * 1001},
        {"eos_token_ids": (0, 2**31 - 1)},
        {"num_generated": 2**31},
        {"top_k": -1},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_sampling_params_are_refused_or_travel(changes: dict[str, object]) -> None:
    """What the settings let pass must not get lost or break a worker."""
    try:
        params = SamplingParams(**changes)
    except ValueError as error:
        assert next(iter(changes)) in str(error)
        return
    begin = Begin(-1, 1, [1], params, live=True)
    assert_same_message(decode(on_the_wire(begin)), begin)


def test_the_time_that_a_request_may_take_is_its_clients_business() -> None:
    begin = Begin(-1, 1, [1], SamplingParams(3, timeout_s=5), live=True)
    assert decode(on_the_wire(begin)).params == SamplingParams(3)


def test_functions_stay_in_their_process() -> None:
    """Between threads they are passed on; no bytes can hold them."""
    with pytest.raises(WireError, match="functions"):
        encode(Begin(-1, 1, [1], SamplingParams(logits_processors=(max,), presence_penalty=1), live=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 0, 8),
        torch.zeros(0),
        torch.zeros(1, 1, 1, 1, 1, 1, 1),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(1, dtype=torch.uint8).expand(2**31 + 1),
        torch.zeros(1).expand(2**29 + 1),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_what_would_not_arrive_is_not_sent(tensor: Tensor) -> None:
    with pytest.raises(WireError, match="^a tensor "):
        encode(ExitState(0, 1, 2, tensor))
    with pytest.raises(WireError, match="^a tensor "):
        split(ExitState(0, 1, 2, tensor))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"hello"],
        [head()],
        [head(VERSION)],
        [head(VERSION + 1, 6, 0, 0)],
        [head("3", 6, 0, 0)],
        [head(True, 6, 0, 0)],
        [head(VERSION, -1, 0, 0)],
        [head(VERSION, len(KINDS), 0, 0)],
        [head(VERSION, True, 0, 0)],
        [head(VERSION, 6, 0)],
        [head(VERSION, 6, 0, 0, 0)],
        [head(VERSION, 6, 0, 0), b""],
        [head(VERSION, 6, 0, 0) + b"\x00"],
        [head(VERSION, 6, 0, 0)[:-1]],
        [head(VERSION, 6, 0, True)],
        [head(VERSION, 6, 0, 0.0)],
        [head(VERSION, 6, 0, "0")],
        [head(VERSION, 6, [0], 0)],
        [head(VERSION, 6, {}, 0)],
        [head(VERSION, 6, msgpack.Ext(1, b"x"), 0)],
        [msgpack.encode(5)],
        [head(VERSION, 10, 0, 0, "x" * (2**16 + 1))],
        [head(VERSION, 10, 0, 0, b"bytes")],
        [head(VERSION, 2, 1, 1, 5, 6, [])],
        [head(VERSION, 2, 1, 1, 5, "6", [])],
        [head(VERSION, 2, 1, 1, 5, [None], [])],
        [head(VERSION, 2, 1, 1, 5, [6, -1], [])],
        [head(VERSION, 2, 1, 1, 5, [6, 2**31], [])],
        [head(VERSION, 2, 1, 1, -1, [6], [])],
        [head(VERSION, 2, 1, 1, 2**32 + 1, [6], [])],
        [head(VERSION, 2, -2, 1, 5, [6], [])],
        [head(VERSION, 2, 2**20 + 1, 1, 5, [6], [])],
        [head(VERSION, 2, 1, -1, 5, [6], [])],
        [head(VERSION, 2, 1, 2**63, 5, [6], [])],
        [b"\x95\x06\x0a\x00\x00\xa2\xff\xff"],  # a text that is no UTF-8
        [head(VERSION, 12, 0, 0, 1, 1, 0, [1, 2.0])],
        [head(VERSION, 12, 0, 0, 1, 1, 0, [*range(2**16 + 1)])],
        [head(VERSION, 13, 0, 0, 1, [], None, None)],
        [head(VERSION, 15, -1, 0, [1], [])],
        [head(VERSION, 15, -1, 0, [1], ["a", "b"])],
        [head(VERSION, 15, -1, 0, [-2], ["a"])],
        [head(VERSION, 15, -1, 0, [*range(1001)], ["a"] * 1001)],
    ],
    ids=repr,
)
def test_headers_that_no_message_has_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": array("q", [1]).tobytes()},
        {"prompt_ids": [-1]},
        {"prompt_ids": [*range(2**21 + 1)]},
        {"max_new_tokens": 0},
        {"max_new_tokens": 2**31},
        {"temperature": -0.5},
        {"temperature": math.nan},
        {"temperature": True},
        {"top_k": -2},
        {"top_p": 1.5},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"stop": [b"x"]},
        {"stop": ["x"] * 1001},
        {"stop": ["x" * (2**16 + 1)]},
        {"ignore_eos": 0},
        {"stop_token_ids": b"[1]"},
        {"logit_bias": {5: 1.0}},
        {"logit_bias": [[5]]},
        {"logit_bias": [[5, 101]]},
        {"logit_bias": [[5, math.nan]]},
        {"logit_bias": b"null"},
        {"suppress_tokens": [-1]},
        {"suppress_tokens": [0] * (2**16 + 1)},
        {"bad_words_ids": [[]]},
        {"schema": {"type": "string"}},
        {"schema": "{"},
        {"regex": "("},
        {"regex": "a", "grammar": 'start: "a"'},
        {"choice": []},
        {"choice": [b"a"]},
        {"grammar": "start: b"},
        {"bad_words_ids": [5]},
        {"sequence_bias": [[[5], -math.inf]]},
        {"exponential_decay_length_penalty": [1, 0]},
        {"min_new_tokens": -1},
        {"renormalize_logits": 1},
        {"traced": 1},
        {"delivered": None},
        {"delivered": [1, 2]},  # more than were asked for
        {"more": 0},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_requests_that_nobody_makes_are_refused(changes: dict[str, object]) -> None:
    assert isinstance(decode([begin_header()]), Begin)
    with pytest.raises(WireError):
        decode([begin_header(**changes)])


def test_candidates_are_bounded() -> None:
    most = Candidate(1, 1, 5, (6,) * 2**20)
    assert decode(on_the_wire(most)) == most
    with pytest.raises(WireError, match="a Candidate: Expected `array` of length <= 1048576 - at token_ids"):
        decode(on_the_wire(Candidate(1, 1, 5, (6,) * (2**20 + 1))))


def test_each_of_several_tokens_has_a_winner() -> None:
    tokens = Tokens(0, 1, 5, [7, 8], [1, -1])
    assert decode(on_the_wire(tokens)).singly() == [Token(0, 1, 5, 7, 1), Token(0, 1, 6, 8, -1)]
    for winners in ([1], [1, 0, 2], []):
        with pytest.raises(WireError, match="contradict"):
            decode(on_the_wire(replace(tokens, winners=winners)))


def test_entries_of_more_tokens_than_a_message_names_are_refused() -> None:
    entries = torch.ones(3, 2, 2, 1, 4)
    assert len(decode(on_the_wire(CatchUp(0, 1, 5, [7, 8, 9], entries))).entries) == 3
    for shapeless in (entries, torch.tensor(1.0)):
        with pytest.raises(WireError, match="contradict"):
            decode(on_the_wire(CatchUp(0, 1, 5, [7, 8][: shapeless.dim()], shapeless)))


def test_a_message_that_nobody_would_take_is_not_sent() -> None:
    with pytest.raises(WireError, match="a Begin of 20\\d+ bytes: 16777216 are the most"):
        encode(Begin(-1, 1, [2**31 - 1] * 4_000_000, SamplingParams(3), True))


@pytest.mark.parametrize(
    ("description", "frame"),
    [
        (described(0, 2), b""),
        (described(0, 2), bytes(7)),
        (described(1, 2), bytes(8)),
        (described(0, 0), b""),
        (described(0, 0, -1), b""),
        (described(0, -2), bytes(8)),
        (described(0), bytes(8)),
        (described(0, *[1] * 7), bytes(4)),
        (described(0, 2)[:-1], bytes(8)),
        (described(0, 2) + b"\0", bytes(8)),
        (described(3, 1), bytes(8)),
        (described(2**62, 2), bytes(8)),
        (b"", bytes(8)),
        (["float32", [2]], bytes(8)),
        (None, bytes(8)),
        ("float32", bytes(8)),
    ],
    ids=repr,
)
def test_tensors_that_do_not_fit_their_description_are_refused(description: object, frame: bytes) -> None:
    with pytest.raises(WireError):
        decode([head(VERSION, 1, 0, 0, 0, description), frame])
    assert decode([head(VERSION, 1, 0, 0, 0, described(0, 2)), bytes(8)]).hidden.tolist() == [0, 0]


@pytest.mark.parametrize("num_frames", [1, 3])
def test_a_tensor_needs_exactly_one_frame(num_frames: int) -> None:
    frames = on_the_wire(HeadStart(1, 1, 1, (1,), torch.ones(2)))
    with pytest.raises(WireError):
        decode((frames + frames[1:])[:num_frames])


@pytest.mark.parametrize(
    "shape", [[2**31], [2**31, 2**31], [2**16] * 6, [2**62], [2**29], [2**63 - 1] * 6, [-(2**63)], [2**31 - 1, 1, 1]]
)
def test_huge_declared_shapes_take_no_memory(shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise AssertionError("memory was asked for")

    for maker in ("empty", "frombuffer"):
        monkeypatch.setattr(wire_tensors.torch, maker, allocate)
    with pytest.raises(WireError):
        decode([head(VERSION, 1, 0, 0, 0, described(0, *shape)), bytes(8)])


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff",  # a text
        b"\xc9\xff\xff\xff\xff\x01",  # an extension
        b"\x94\x06\x06\x00\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xdd\x00\x00\xff\xff" * 20_000,
        b"\x94\x06\x06\x00" + b"\x91" * 400 + b"\x00",
        b"\x81\x00" * 50_000,
        b"\x00" * (16 * 2**20 + 1),
    ],
    ids=lambda header: repr(header[:12]),
)
def test_headers_that_promise_much_are_refused_at_once(header: bytes) -> None:
    began = time.perf_counter()
    with pytest.raises(WireError):
        decode([header])
    assert time.perf_counter() - began < 30


def test_a_list_that_promises_more_than_follows_takes_no_memory() -> None:
    start = head(VERSION, 0, -1, 1, 0)[:-1].replace(b"\x95", b"\x9e")
    tracemalloc.start()
    try:
        for length in (2**21, 2**21 + 1, 2**32 - 1):
            with pytest.raises(WireError):
                decode([start + b"\xdd" + length.to_bytes(4, "big")])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


json_like = st.recursive(
    st.none() | st.booleans() | any_number | st.floats() | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_arbitrary_bytes_are_a_message_or_a_wire_error(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode(frames), Message)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.integers(-1, len(KINDS)), st.lists(json_like, max_size=12), st.lists(st.binary(max_size=20), max_size=2))
@example(1, [0, 0, 0, described(0, 2**63 - 1)], [b""])
def test_arbitrary_fields_are_a_message_or_a_wire_error(kind: int, fields: list[object], rest: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode([head(VERSION, kind, *fields), *rest]), KINDS[kind])


@settings(max_examples=400, derandomize=True, deadline=None)
@given(any_message, st.data())
def test_damaged_messages_are_messages_or_wire_errors(message: Message, data: st.DataObject) -> None:
    frames = on_the_wire(message)
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[which])
    start = data.draw(st.integers(0, len(frame)))
    frame[start : start + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    frames[which] = bytes(frame)
    frames = data.draw(st.sampled_from([frames, frames[:-1], [*frames, b""], frames[::-1], frames * 2]))
    try:
        arrived = decode(frames)
    except WireError:
        return
    assert arrived is not None
    for field, wanted in zip(dataclasses.fields(arrived), field_types(type(arrived)), strict=True):
        value = getattr(arrived, field.name)
        assert isinstance(
            value,
            {
                float: (int, float),
                list[int]: list,
                tuple[int, ...]: tuple,
                tuple[float, ...]: tuple,
                list[str]: list,
            }.get(base_type(wanted), base_type(wanted)),
        )


def test_a_text_of_the_greatest_length_travels() -> None:
    for text in ("x" * 2**16, "🦊" * 2**16):
        assert decode(on_the_wire(Failed(1, 0, text))).error == text


def test_a_prompt_of_a_million_tokens_travels() -> None:
    prompt = list(range(10**6))
    begin = Begin(-1, 1, prompt, SamplingParams(3), True)
    assert decode(on_the_wire(begin)).prompt_ids == prompt


@pytest.mark.parametrize("number", [math.nan, 0.5, -10_001.0, math.inf])
def test_log_probabilities_out_of_range_are_refused(number: float) -> None:
    frames = on_the_wire(Token(0, 1, 5, 7, 1, None, (-0.5, number)))
    with pytest.raises(WireError, match="logprobs"):
        decode(frames)


def head_of(message: Message) -> list[object]:
    return msgpack.decode(on_the_wire(message)[0])


def test_what_cannot_be_read_says_whose_it_is() -> None:
    """So far as it says: of another version, too."""
    begin, token = head_of(Begin(-1, 7, [1], SamplingParams(3), True)), head_of(Token(2, 7, 5, 17, 1))
    other = msgpack.encode([VERSION - 1, *begin[1:]])
    reason = f"not a message of wire version {VERSION}"
    assert received([other]) == Unreadable(-1, 7, "", reason)
    short = "a Token: Expected `array` of length 11, got 10"
    assert received([msgpack.encode(token[:-1])]) == Unreadable(2, 7, "Token", short)
    late = msgpack.encode([*token[:5], 2**31, *token[6:]])
    assert received([late]) == Unreadable(2, 7, "Token", "a Token: Expected `int` <= 2147483647 - at token_id")
    unknown = msgpack.encode([VERSION, len(KINDS), 2, 7])
    assert received([unknown]) == Unreadable(2, 7, "", "unknown kind of message")
    for nobodys in ([VERSION, 4], [VERSION, 4, 2, -1], [VERSION, 4, "2", 7], [VERSION, 4, 2**21, 7], 5, {}):
        assert received([msgpack.encode(nobodys)]) is None
    assert received([]) is None
    assert received([b"\xc1"]) is None
    assert received(on_the_wire(Token(2, 7, 5, 17, 1))) == Token(2, 7, 5, 17, 1)
