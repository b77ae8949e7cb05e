"""`benchmarks.serve_guidellm`: what it asks the load generator for, and what it reads in its report."""

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import Running, running

from benchmarks import serve_guidellm
from benchmarks.serve import load_name
from ppd_runtime import OrdinaryDecoding

FAKE = shlex.join([sys.executable, str(Path(__file__).parents[1] / "fake_guidellm.py")])


@pytest.fixture
def server(model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """What the benchmark puts under load, in this process."""
    with running(OrdinaryDecoding(model_folder("llama", num_layers=2))) as found:
        monkeypatch.setattr(serve_guidellm, "served", lambda options, stages: contextlib.nullcontext(found))
        yield found


def measured(folder: Path, *options: str) -> dict:
    given = ["--model", str(folder), "--requests", "3", "--tokens", "4", "--prompt-tokens", "5", *options]
    return serve_guidellm.measure(serve_guidellm.parser().parse_args(given))


def test_both_loops_are_asked_for_and_read(server: Running, model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama", num_layers=2)
    figures = measured(folder, "--guidellm", FAKE, "--at-once", "1,2", "--rates", "2.5")
    loads = figures["loads"]
    assert [load_name(load) for load in loads] == ["1 at once", "2 at once", "2.5 a second"]
    assert [(load["requests"], load["failed"]) for load in loads] == [(3, 0)] * 3
    counted = server.counts()
    assert counted["vllm:request_success_total"] == 9
    assert counted["vllm:generation_tokens_total"] == 9 * 4
    for load in loads:
        assert load["tokens_per_second"] > 0
        for low, middle, high in (load["first_token_ms"], load["between_tokens_ms"]):
            assert 0 < low <= middle <= high
    assert json.loads(json.dumps(figures))["compiled"] is False
    rows = serve_guidellm.table(figures).splitlines()
    assert len(rows) == 2 + 3
    assert rows[-1].startswith("| 2.5 a second | 3 | 0 | ")


def test_an_open_loop_is_not_asked_for_by_itself(server: Running, model_folder: Callable[..., Path]) -> None:
    (load,) = measured(model_folder("llama", num_layers=2), "--guidellm", FAKE, "--at-once", "2")["loads"]
    assert (load["loop"], load["at_once"]) == ("closed", 2)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("no-such-guidellm", "--guidellm no-such-guidellm: No such file or directory; install guidellm, or say where"),
        (shlex.join([sys.executable, "-c", "raise SystemExit('no such option')"]), "guidellm ended with 1: no such"),
        (shlex.join([sys.executable, "-c", "print('nothing to do')"]), "guidellm ended with 0: nothing to do"),
    ],
)
def test_a_generator_that_fails_is_told(
    server: Running, model_folder: Callable[..., Path], program: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        measured(model_folder("llama", num_layers=2), "--guidellm", program, "--at-once", "1")
