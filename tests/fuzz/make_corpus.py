"""Writes the stored corpus: one small real message of each kind, and streams of several.

After a change of the wire format: `PYTHONPATH=tests:. python -m fuzz.make_corpus`. It looks for
refused inputs, too, and keeps the shortest for each reason to refuse one.
"""

import re
import struct

import torch
from fuzz.inputs import CORPUS, mutations
from fuzz.targets import frames_of

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
)
from ppd_runtime.pipeline.wire import KIND_NAMES, WireError, decode, encode, split
from ppd_runtime.results import PathStats
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.tracing.breakdown import LatencyBreakdown

REFUSED = "refused"
SEEDS, TRIES = 40, 2000
STATE = torch.linspace(-1, 1, 8).view(1, 1, 8)
ENTRIES = torch.linspace(-1, 1, 16).bfloat16().view(1, 2, 2, 1, 4)
PARAMS = SamplingParams(
    16, 0.7, 40, 0.9, 1.1, 2**64 - 1, ("\n\n", "é"), False, 0.05, 1.5, -0.5, (3, 4), num_generated=2,
    logprobs=3, eos_token_ids=(7,),
    logit_bias={5: -100}, bad_words_ids=[[6, 7], [8]], suppress_tokens=[9], exponential_decay_length_penalty=(5, 1.5)
)  # fmt: skip
BEGIN = Begin(-1, 1, [5, 6, 7], PARAMS, True, True, [8, 9])
MESSAGES: tuple[Message, ...] = (
    BEGIN,
    ExitState(0, 1, 4, STATE),
    Candidate(1, 1, 5, (17,)),
    Candidate(2, 1, 5, (17, 18), [3, 4]),
    HeadStart(1, 1, 5, (17, 18), STATE.expand(1, 2, 8), [], 12.5),
    Token(0, 1, 5, 17, 1),
    Token(0, 1, 5, 17, 1, STATE.half()),
    Entries(1, 1, 5, ENTRIES, 12.75),
    End(0, 1),
    Cancel(-1, 2),
    Finished(0, 1, "length", 16, PathStats(0.25, 0.25, 0.25, 96, 0, 0, *[LatencyBreakdown(*[0.125] * 5)] * 2)),
    Report(1, 1, 48, 12),
    Failed(2, 0, "RuntimeError: out of memory"),
    Shutdown(-1, 0),
    Spans(0, 1, 4711, -5, 0, [0, 10, 20, 5, -1, 0, 6, -1, -1]),
    CatchUp(0, 1, 5, [17, 18], ENTRIES),
    CatchUp(0, 1, 5, [17, 18]),
    Missing(1, 1, 5),
    Peers(-1, 0, [0, 1], ["tcp://127.0.0.1:5000", "tcp://[::1]:5000"]),
    LinkNote(1, 0, "ab-cd", "word up/0", b"\x7f\0\0\1"),
    TensorAnnouncement(0, 1, "ab-cd", 3, 32, split(ExitState(0, 1, 4, STATE))[0]),
    Tokens(0, 1, 5, [17, 18, 9], [1, 0, -1]),
    PromptStates(1, 1, 2, 256, STATE),
    Rows(1, 1, 2, 7, (12, 13), (11, 11), (5, 5), (17, 18), STATE.expand(1, 2, 8), 12.5),
    Guesses(1, 1, 2, 7, (12,), (17, 18), (500_000, 250_000)),
    Token(0, 1, 5, 17, 1, None, (-0.5, -0.25, -1.5), (17, 18)),
    Foreseen(1, 1, 5, 2),
    Finished(0, 1, "error", 3, PathStats(0.25), "no numbers"),
    Refused(1, 1, -1, "token id 300", True),
)


def on_the_stream(message: Message) -> bytes:
    """As `transport.streams` writes it."""
    header, *rest = (bytes(frame) for frame in encode(message))
    return struct.pack("<4sIQ", b"ppd1", len(header), sum(map(len, rest))) + header + b"".join(rest)


def in_the_ring(message: Message, position: int) -> bytes:
    """As `transport.streams` writes it where the tensor is at a position of the stream's ring."""
    header, tensor = (bytes(frame) for frame in encode(message))
    return struct.pack("<4sIQ", b"ppdr", len(header), len(tensor)) + header + struct.pack("<Q", position)


def write_rings() -> None:
    """Streams with tensors at the beginning of a ring, behind each other, and a lap further."""
    states = [PromptStates(1, 1, 2, 256, torch.zeros(1, rows, 8)) for rows in (4, 30, 98)]
    for number, places in enumerate(([0], [0, 128], [0, 128, 4096], [0, 4096, 8192])):
        parts = [in_the_ring(*pair) for pair in zip(states, places, strict=False)]
        write("ring", f"{number:02d}", b"".join([*parts, on_the_stream(End(0, 1))]))


def write(target: str, name: str, data: bytes) -> None:
    """One stored input."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def refusal(data: bytes) -> str | None:
    """Why an input is no message, whatever its kind, the place and the values; None where it is one."""
    try:
        decode(frames_of(data))
    except WireError as error:
        return re.sub(rf"\b({'|'.join(KIND_NAMES)})\b|,? (got|at|in position) .*|-?\b\d[\w.+]*|'.x..'", "…", str(error))
    return None


def main() -> None:
    """Write all."""
    for old in CORPUS.glob("*/*"):  # what is no message any more, too
        old.unlink()
    for number, message in enumerate(MESSAGES):
        header, *rest = (bytes(frame) for frame in encode(message))
        name = f"{number:02d}-{type(message).__name__}"
        write("decoding", name, len(header).to_bytes(2, "little") + header + b"".join(rest))
        write("stream", name, bytes([number * 12 % 256]) + on_the_stream(message))
    whole = b"".join(map(on_the_stream, MESSAGES))
    for size in (0, 6, 63, 255):
        write("stream", f"all-{size}", bytes([size]) + whole)
    for number in range(8):
        write("round_trip", f"{number:02d}", bytes([number % 2, number]) + bytes(range(number, 250, number + 1)))
    write_rings()
    shortest: dict[str, bytes] = {}
    for seed in range(SEEDS):
        for data in mutations("decoding", seed, TRIES):
            reason = refusal(data)
            if reason and len(data) < len(shortest.get(reason, data + b"+")):
                shortest[reason] = data
    for number, reason in enumerate(sorted(shortest)):
        write("decoding", f"{REFUSED}-{number:02d}", shortest[reason])


if __name__ == "__main__":
    main()
