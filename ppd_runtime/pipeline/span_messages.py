"""Packs a process' spans into messages of bounded size, and unpacks and checks them."""

from collections.abc import Iterator, Sequence

from ppd_runtime.pipeline.messages import Spans
from ppd_runtime.pipeline.wire import KIND_NAMES, WireError
from ppd_runtime.tracing.spans import Kind, ProcessSpans, Span

MOST_SPANS = 4096
"""Most spans of a message, some 150 kB."""
_WIDTH = len(Span._fields)
_NUMBERS = {name: number for number, name in enumerate(KIND_NAMES)} | {"": -1}
_NAMES = {number: name for name, number in _NUMBERS.items()}


def pack(recorded: ProcessSpans, request: int, watched: bool = False) -> Iterator[Spans]:
    """The messages that hold `recorded`, at least one; with `watched` they are for a watching client."""
    for start in range(0, max(len(recorded.spans), 1), MOST_SPANS):
        piece = recorded.spans[start : start + MOST_SPANS]
        numbers = [int(number) for span in piece for number in (*span[:-1], _NUMBERS[span.message])]
        yield Spans(recorded.rank, request, recorded.pid, recorded.wall_offset_ns, recorded.dropped, numbers, watched)


def unpack(pieces: Sequence[Spans]) -> ProcessSpans:
    """The spans that `pack` was given, from its messages in order.

    Raises:
        WireError: if `pack` does not write such messages.
    """
    first, spans = pieces[0], []
    for piece in pieces:
        numbers = piece.numbers
        if len(numbers) % _WIDTH or len(numbers) > _WIDTH * MOST_SPANS:
            raise WireError(f"spans of {len(numbers)} numbers")
        spans += [_span(numbers[i : i + _WIDTH]) for i in range(0, len(numbers), _WIDTH)]
    return ProcessSpans(first.sender, first.pid, first.wall_offset_ns, first.dropped, tuple(spans))


def _span(numbers: list[int]) -> Span:
    kind, began, ended, position, token, first, last, peer, message = numbers
    if not 0 <= kind < len(Kind) or not 0 <= began <= ended or message not in _NAMES:
        raise WireError("a span of no kind, or that ended before it began")
    return Span(kind, began, ended, position, token, first, last, peer, _NAMES[message])
