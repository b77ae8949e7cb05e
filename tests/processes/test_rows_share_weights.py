"""`rows_share_weights`: layouts and methods give ordinary decoding's texts with the same setting, in any format."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families.specimens import SPECIAL, SUPPORTED, Specimen
from grids import nightly
from models_for_tests import build_tokenizer

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams, decode
from ppd_runtime.models.stage.bit_probe import output_hashes
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.row_attention import ROWS
from ppd_runtime.models.stage.rows_range import RowsRange
from ppd_runtime.tune.prompt_files import read_prompts
from ppd_runtime.workers.bits import Bits

ModelFolder = Callable[..., Path]
PROMPTS = ([5], [40, 7, 291, 65, 133, 9, 12, 250], list(range(20, 83)))
SAMPLINGS = (SamplingParams(20, ignore_eos=True), SamplingParams(20, temperature=1.0, seed=4, ignore_eos=True))
LAYOUTS = ({"stages": 2, "k": 2, "rows": 8}, {"k": 2}, {"stages": 1, "rows": 8})
FAMILIES = ("llama", "qwen3", "gemma2", "mixtral")
CASES = [(family, "bfloat16") for family in FAMILIES]
CASES += [pytest.param((family, "float32"), marks=nightly) for family in FAMILIES]


def shared(model: Path | str, dtype: str) -> dict[str, object]:
    return {"model": str(model), "dtype": dtype, "rows_share_weights": True}


@pytest.fixture(params=CASES, ids=str)
def settings(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Iterator[dict[str, object]]:
    family, dtype = request.param
    yield shared(model_folder(family, vocab_size=320, num_layers=4, quiet_from=2), dtype)


def test_texts_are_ordinary_decodings(settings: dict[str, object]) -> None:
    ordinary = OrdinaryDecoding(**settings)
    assert isinstance(ordinary.stage, RowsRange)
    _compare_layouts(ordinary, settings)


@nightly
@pytest.mark.parametrize("specimen", [*map(Specimen, SUPPORTED), *SPECIAL], ids=lambda specimen: specimen.name)
def test_every_family(specimen: Specimen, tmp_path: Path) -> None:
    """Whether its rows can share passes or not."""
    specimen.build().to(torch.bfloat16).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    settings = shared(tmp_path, "bfloat16")
    _compare_layouts(OrdinaryDecoding(**settings), settings)


def _compare_layouts(ordinary: OrdinaryDecoding, settings: dict[str, object]) -> None:
    """Each layout's texts with ordinary decoding's, one request after the other and several at once."""
    asked = [(prompt, params) for prompt in PROMPTS for params in SAMPLINGS]
    expected = [ordinary.generate(*one).token_ids for one in asked]
    for layout in LAYOUTS:
        with PPDRuntime(transport="local", speculation="always", **layout, **settings) as runtime:
            assert [runtime.generate(*one).token_ids for one in asked] == expected, layout
            if "stages" in layout:
                with ThreadPoolExecutor(4) as threads:
                    together = threads.map(lambda one: runtime.generate(*one).token_ids, asked)
                    assert list(together) == expected, layout


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_methods_verify_in_half_precision(dtype: str, model_folder: ModelFolder) -> None:
    """A verification's rows have the bits of single tokens, so no near tie goes another way."""
    settings = shared(model_folder("llama", num_layers=4, quiet_from=2, dtype=dtype), dtype)
    ordinary = OrdinaryDecoding(**settings)
    for prompt in PROMPTS:
        for params in SAMPLINGS:
            found = decode(
                prompt=prompt, params=params, method="layerskip", exit_layer=2, num_speculations=4, **settings
            )
            assert found.token_ids == ordinary.generate(prompt, params).token_ids


def test_processes_and_their_handshake(model_folder: ModelFolder) -> None:
    """Stages in processes of their own compare hashes of padded passes, and rows of four requests share passes."""
    settings = shared(model_folder("llama", num_layers=4, quiet_from=2, dtype="bfloat16"), "bfloat16")
    expected = [OrdinaryDecoding(**settings).generate(prompt, SAMPLINGS[1]).token_ids for prompt in PROMPTS]
    with PPDRuntime(stages=2, launcher="processes", **settings) as runtime, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda prompt: runtime.generate(prompt, SAMPLINGS[1]).token_ids, PROMPTS))
    assert found == expected


def test_workers_with_other_passes_are_refused(model_folder: ModelFolder) -> None:
    """Their hashes differ in every case, though their bits may be equal in what the comparison runs."""
    stage = OrdinaryDecoding(**shared(model_folder("llama"), "bfloat16")).stage
    padded, usual = (Bits("", output_hashes(one)) for one in (stage, LayerRange(stage.model)))
    assert padded.hashes["the rows of a pass"] == str(ROWS)
    assert "the rows of a pass" in padded.different(usual)


def test_a_model_that_cannot_share_runs_one_row_a_pass(
    model_folder: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    settings = shared(model_folder("gemma2"), "float32")
    ordinary = OrdinaryDecoding(**settings)
    assert not isinstance(ordinary.stage, RowsRange)
    assert "rows_share_weights: each row is a pass of its own, because 8 rows of 300 numbers" in caplog.text
    with PPDRuntime(stages=2, transport="local", speculation="always", **settings) as runtime:
        assert (
            runtime.generate(PROMPTS[1], SAMPLINGS[1]).token_ids
            == ordinary.generate(PROMPTS[1], SAMPLINGS[1]).token_ids
        )
    caplog.clear()
    with PPDRuntime(stages=2, launcher="processes", **settings):
        assert caplog.text.count("each row is a pass of its own") == 1, "the last stage's, as its process has no log"


@pytest.mark.parametrize(
    "other", [{"compile": True}, {"weights": "int8"}, {"layout": "auto"}], ids=lambda other: next(iter(other))
)
def test_settings_that_share_rows_otherwise(other: dict[str, object]) -> None:
    (name,) = other
    with pytest.raises(ValueError, match=f"rows_share_weights=True with {name}=.*, which needs other passes: drop one"):
        PPDRuntime("demo", rows_share_weights=True, **other)


@nightly
@pytest.mark.parametrize("prompt", [prompt.text for prompt in read_prompts("demo", 6)], ids=range(6))
def test_bfloat16_texts_in_stages_of_several_rows(prompt: str) -> None:
    """At temperature 1 a sixth of such texts had another token when rows ran together in compiled code."""
    params = [SamplingParams(200, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    settings = shared("demo", "bfloat16")
    ordinary = OrdinaryDecoding(**settings)
    with PPDRuntime(stages=2, k=3, rows=8, transport="local", **settings) as runtime:
        for asked in params:
            assert runtime.generate(prompt, asked).token_ids == ordinary.generate(prompt, asked).token_ids
