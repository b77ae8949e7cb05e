"""The staged layout in processes of its own: ordinary decoding's texts by every launcher and transport."""

import pytest
from grids import nightly

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.chunks import PROMPT_CHUNKS

pytestmark = pytest.mark.processes
PROMPT = "def read_lines(path):"
LONG_PROMPT = list(range(1, sum(PROMPT_CHUNKS[:2]) + 2))
REPETITIVE = "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1, 2, 3]\ny = ["
SAMPLED = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def ordinary():
    """The oracle."""
    return OrdinaryDecoding("demo", dtype="float32")


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({"stages": 2}, {"launcher": "processes", "transport": "unix"}),
        ({"cuts": "2,5,9", "k": 2, "rows": 3, "guess_vocab": 200}, {"launcher": "processes", "transport": "zeromq"}),
        ({"stages": 3, "k": 1}, {"launcher": "processes", "transport": "collective"}),
        ({"stages": 2}, {"launcher": "ray"}),
    ],
    ids=str,
)
def test_texts_are_ordinary_decodings(ordinary, settings, way):
    with PPDRuntime("demo", dtype="float32", speculation="always", **settings, **way) as runtime:
        for prompt, sampling in ((PROMPT, {}), (PROMPT, SAMPLED), (LONG_PROMPT, SAMPLED)):
            expected = ordinary.generate(prompt, max_new_tokens=24, **sampling)
            result = runtime.generate(prompt, max_new_tokens=24, **sampling)
            assert result.token_ids == expected.token_ids
            assert result.finish_reason == expected.finish_reason
            assert sum(result.stats.first_boundary) == result.stats.new_tokens - 1


def test_one_process_decodes_where_that_is_known_to_be_quicker(one_process):
    """A last stage that loads all layers beside its own, compiled, and other stages that hear nothing."""
    one_process((0.5, 0.5, 0.5, 0.1))
    settings = {"dtype": "float32", "compile": True}
    compiled = OrdinaryDecoding("demo", **settings)
    with PPDRuntime("demo", stages=2, launcher="processes", **settings) as runtime:
        for prompt, sampling in ((PROMPT, {}), (REPETITIVE, SAMPLED)):
            result = runtime.generate(prompt, max_new_tokens=24, **sampling)
            assert result.token_ids == compiled.generate(prompt, max_new_tokens=24, **sampling).token_ids
            assert (result.stats.one_process, result.stats.sub_layer_passes) == (True, ())
        long = runtime.generate(LONG_PROMPT, max_new_tokens=4)
        assert long.token_ids == compiled.generate(LONG_PROMPT, max_new_tokens=4).token_ids
        assert not long.stats.one_process


def test_one_stage():
    """It is a thread of this process, and a repetitive text takes it fewer passes than tokens."""
    settings = {"dtype": "float32", "compile": True}
    compiled = OrdinaryDecoding("demo", **settings)
    with PPDRuntime("demo", stages=1, rows=4, speculation="always", **settings) as runtime:
        assert runtime.launcher == "threads"
        for prompt, sampling in ((REPETITIVE, {}), (PROMPT, SAMPLED), (LONG_PROMPT, {})):
            asked = {"max_new_tokens": 48, "ignore_eos": True, "logprobs": 1, **sampling}
            result, expected = runtime.generate(prompt, **asked), compiled.generate(prompt, **asked)
            assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)
            assert result.stats.hits + result.stats.misses == 47
            if prompt is REPETITIVE:
                assert result.stats.hits > 12
        again = runtime.generate(PROMPT, **asked | SAMPLED)
        assert again.token_ids == compiled.generate(PROMPT, **asked | SAMPLED).token_ids
        assert again.stats.hits > 30, "an earlier text is quoted"
    with PPDRuntime("demo", stages=1, launcher="processes", **settings) as runtime:
        expected = compiled.generate(REPETITIVE, max_new_tokens=24).token_ids
        assert runtime.generate(REPETITIVE, max_new_tokens=24).token_ids == expected


@pytest.mark.parametrize("rows", [pytest.param(1, marks=nightly), 4])
def test_compiled(rows):
    settings = {"dtype": "float32", "compile": True}
    compiled = OrdinaryDecoding("demo", **settings)
    with PPDRuntime("demo", stages=2, rows=rows, launcher="processes", trace=True, **settings) as runtime:
        for prompt, sampling in ((PROMPT, {}), (LONG_PROMPT, SAMPLED), (REPETITIVE, {})):
            asked = {"max_new_tokens": 48, "ignore_eos": True, **sampling}
            assert runtime.generate(prompt, **asked).token_ids == compiled.generate(prompt, **asked).token_ids
