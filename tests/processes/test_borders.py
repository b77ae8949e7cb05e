"""Texts that outgrow a rotary table: in both layouts, after a restart, across stop texts, traced; in compiled code."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from families.attack import prompts
from families.specimens import BORDER, SPECIAL
from grids import nightly
from models_for_tests import build_tokenizer
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime, open_method
from ppd_runtime.models.stage import chunks

NEW_TOKENS = 16
(PROMPT,) = prompts([BORDER - 6])
LAST_BEFORE = BORDER + 1 - len(PROMPT)  # new tokens behind which the library reads the text anew
SAMPLED = {"temperature": 0.9, "seed": 3}
CHUNK = 8
BY_NAME = {specimen.name: specimen for specimen in SPECIAL}


@pytest.fixture(scope="module", params=["phi3, longrope", "llama, longrope"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that transformers reads again at the border, and one that it does not."""
    return saved(request.param, tmp_path_factory.mktemp("model"))


def saved(name: str, folder: Path) -> str:
    BY_NAME[name].build().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("killed_after", [6, *(pytest.param(tokens, marks=nightly) for tokens in (2, 7, 11))])
def test_a_new_main_process_goes_on_with_the_same_text(folder: str, killed_after: int) -> None:
    """Killed before the border, at it, and behind it."""
    expected = OrdinaryDecoding(folder, dtype="float32").generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with PPDRuntime(folder, k=1, exit_layer=2, dtype="float32", launcher="processes") as runtime:
        stream = runtime.stream(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        tokens = [next(stream).token_id for _ in range(killed_after)]
        worker_processes()["main"].kill()
        tokens += [event.token_id for event in stream]
        assert tuple(tokens) == expected.token_ids
        assert runtime.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True).token_ids == expected.token_ids


@pytest.mark.parametrize("name", ["phi3, longrope", pytest.param("llama, longrope", marks=nightly)])
def test_killed_stages_have_successors_at_the_border(name: str, tmp_path: Path) -> None:
    """Killed before the border, at it, and behind it, while another request is on its way there too."""
    folder = saved(name, tmp_path)
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    expected = [tokens_of(ordinary, PROMPT, sampling) for sampling in ({}, SAMPLED)]
    settings: dict[str, Any] = {"k": 2, "rows": 2, "max_requests": 2, "dtype": "float32", "launcher": "processes"}
    with PPDRuntime(folder, stages=3, **settings) as runtime:
        for number, stage in enumerate(("stage-1", "stage-3", "stage-2")):
            asked = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            streams = [runtime.stream(PROMPT, **asked, **sampling) for sampling in ({}, SAMPLED)]
            at = LAST_BEFORE - 1 + number
            texts = [[next(stream).token_id for _ in range(at)] for stream in streams]
            worker_processes()[stage].kill()
            for text, stream in zip(texts, streams, strict=True):
                text += [event.token_id for event in stream]
            assert list(map(tuple, texts)) == expected, stage
            assert runtime.restarts == number + 1


def test_several_requests_cross_the_border_in_stages(folder: str) -> None:
    """Each at another time; some are behind it from the beginning, or never reach it."""
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    texts = prompts([BORDER - 6, BORDER - 1, BORDER + 1, 17])
    asked = [(prompt, sampling) for prompt in texts for sampling in ({}, SAMPLED)]
    expected = [tokens_of(ordinary, *one) for one in asked]
    settings: dict[str, Any] = {"k": 2, "rows": 2, "max_requests": 3, "dtype": "float32", "transport": "local"}
    with PPDRuntime(folder, stages=3, **settings) as runtime, ThreadPoolExecutor(3) as callers:
        assert list(callers.map(lambda one: tokens_of(runtime, *one), asked)) == expected


def test_a_long_text_takes_nothing_from_a_short_one(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning has other entries where the whole is longer than the border; short ones share theirs."""
    monkeypatch.setattr(chunks, "ONE_PASS", CHUNK)
    monkeypatch.setattr(chunks, "PROMPT_CHUNKS", (CHUNK, CHUNK))
    (longest,) = prompts([BORDER + CHUNK])
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    taken: list[int] = []
    settings: dict[str, Any] = {"prefix_cache_tokens": 64 * CHUNK, "dtype": "float32", "transport": "local"}
    with PPDRuntime(folder, stages=2, **settings) as runtime:
        for length in (BORDER - 6, BORDER, BORDER + 1, BORDER + CHUNK, BORDER - 6):
            for sampling in ({}, SAMPLED):
                result = runtime.generate(longest[:length], max_new_tokens=NEW_TOKENS, ignore_eos=True, **sampling)
                assert result.token_ids == tokens_of(ordinary, longest[:length], sampling)
                taken.append(result.stats.cached_tokens)
    assert taken == [0, 40, 40, 48, 0, 0, 0, 0, 40, 40]


def tokens_of(generator: Any, prompt: list[int], sampling: dict[str, Any]) -> tuple[int, ...]:
    return generator.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, **sampling).token_ids


def test_stop_texts_statistics_and_traces_span_the_border(folder: str) -> None:
    asked = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    ordinary = OrdinaryDecoding(folder, dtype="float32", trace=True)
    whole = ordinary.generate(PROMPT, **asked)
    tokenizer = build_tokenizer()
    before, behind = (tokenizer.decode(whole.token_ids[a:b]) for a, b in ((5, 7), (7, 9)))
    stop = before[-1:] + behind[:1]
    assert stop in whole.text
    positions = [span.position for span in whole.trace.processes[0].spans if span.first == 0]
    assert {len(PROMPT), BORDER + 4} <= set(positions), "layers were run before the border and behind it"
    with PPDRuntime(folder, k=2, exit_layer=2, dtype="float32", transport="local", trace=True) as runtime:
        layerskip = open_method(folder, "layerskip", dtype="float32", exit_layer=1)
        for generator in (ordinary, runtime, layerskip):
            result = generator.generate(PROMPT, stop=stop, **asked)
            assert (result.finish_reason, result.text) == ("stop", whole.text[: whole.text.index(stop)])
            streamed = generator.stream(PROMPT, stop=stop, **asked)
            assert "".join(event.text for event in streamed) == result.text
            result = generator.generate(PROMPT, **asked)
            assert (result.finish_reason, result.token_ids) == ("length", whole.token_ids)
            assert sum(result.stats.run_lengths) == result.stats.new_tokens == NEW_TOKENS
            assert result.stats.ledger.total_s == pytest.approx(result.stats.latency_s, rel=0.3)
            end = whole.token_ids[8]
            ended = generator.generate(PROMPT, stop_token_ids=end, **asked)
            assert ended.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
        timed_out = runtime.generate(PROMPT, timeout_s=1e-4, **asked)
        assert timed_out.finish_reason == "timeout"


@nightly
@pytest.mark.parametrize("name", ["llama, longrope", "llama, overlooked layer kinds", "granite, multipliers"])
def test_compiled(name: str, tmp_path: Path) -> None:
    """Compiled code keeps to the same borders, windows and multipliers, drafts and verifications too."""
    folder = saved(name, tmp_path)
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    stages: dict[str, Any] = {"rows": 4, "max_requests": 2, "dtype": "float32", "launcher": "processes"}
    others: list[Any] = [
        PPDRuntime(folder, stages=2, compile=True, **stages),
        OrdinaryDecoding(folder, dtype="float32", compile=True),
        open_method(folder, "layerskip", dtype="float32", compile=True, exit_layer=2, num_speculations=5),
    ]
    for prompt in (PROMPT, *prompts([5, 17])):
        for sampling in ({}, {"temperature": 0.8, "seed": 3}):
            asked = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling}
            texts = {generator.generate(prompt, **asked).token_ids for generator in (ordinary, *others)}
            assert len(texts) == 1
    for generator in others:
        generator.close()


def test_cancelled_at_the_border(tmp_path: Path) -> None:
    """The text is not read again where that is not needed, and what was held back of it comes with the result."""
    folder = saved("phi3, longrope", tmp_path)
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    stream = ordinary.stream(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    tokens = [next(stream).token_id for _ in range(BORDER + 1 - len(PROMPT))]
    passes = ordinary.stage.layer_passes
    ordinary.cancel()
    assert not list(stream)
    assert stream.result.finish_reason == "cancelled"
    assert list(stream.result.token_ids) == tokens
    assert ordinary.stage.layer_passes == passes
    assert len(ordinary.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True).token_ids) == NEW_TOKENS
