"""Rows of a stage run together in code of our own alone: elsewhere a trial may miss a difference."""

import pytest
from compilers import needs_compiler
from grids import nightly
from models_for_tests import load_stage

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.models.compiled.export import compile_layers
from ppd_runtime.models.compiled.passes import CompiledLayers
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.tune.prompt_files import read_prompts

pytestmark = needs_compiler


def test_bfloat16_rows_run_one_by_one(model_folder):
    """Sums in another order are mostly rounded to the same number."""
    whole = load_stage(model_folder("llama", dtype="bfloat16"), dtype="bfloat16")
    kinds = (PassKind.ONE, PassKind.SEVERAL)
    files = {kind: compile_layers(whole.model.config, whole.model.dtype, whole.device, kind) for kind in kinds}
    stage = type(whole)(whole.model, CompiledLayers(whole.model, files))
    assert stage.compiles_chains(8), "they could"
    rows = TreeRange(stage, 24)
    assert (rows.most_together, rows.joins_requests) == (1, False)


@pytest.mark.parametrize("prompt", [prompt.text for prompt in read_prompts("demo", 6)], ids=range(6))
@nightly
def test_bfloat16_texts_in_stages_of_several_rows(prompt):
    """At temperature 1 a sixth of such texts had another token when rows ran together, on a CPU with AVX512-BF16."""
    place = {"dtype": "bfloat16", "compile": True}
    params = [SamplingParams(200, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    ordinary = OrdinaryDecoding("demo", **place)
    with PPDRuntime("demo", stages=2, k=3, rows=8, transport="local", **place) as runtime:
        for asked in params:
            assert runtime.generate(prompt, asked).token_ids == ordinary.generate(prompt, asked).token_ids
