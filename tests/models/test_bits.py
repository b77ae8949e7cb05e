"""What workers say of their bits: alike for stages of one model, unlike for other kernels; and what is made of it."""

import json
import os
import subprocess
import sys
from itertools import cycle

import pytest
import torch
from families.specimens import SUPPORTED, Specimen
from grids import nightly
from models_for_tests import FAMILIES, build_tokenizer

from ppd_runtime import PPDRuntime
from ppd_runtime.launch.bit_handshake import BitHandshake
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.compiled import passes
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.native.products import in_tiles
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.bit_probe import output_hashes
from ppd_runtime.models.stage.chunks import PROMPT_CHUNKS
from ppd_runtime.settings.layouts import DECIDER, PaperLayout, StagedLayout
from ppd_runtime.workers.bits import Bits
from ppd_runtime.workers.process import read_answer
from ppd_runtime.workers.worker import Worker

HASHES = """
import sys, json
from ppd_runtime.imports import quick_imports
with quick_imports():
    import torch
    from ppd_runtime.models.checkpoint.description import describe
    from ppd_runtime.models.build import load_stage
    from ppd_runtime.models.stage.bit_probe import output_hashes
torch.set_num_threads(1)
print(json.dumps(output_hashes(load_stage(describe("demo"), 6, torch.float32, "cpu"))))
"""


@pytest.mark.parametrize(
    ("family", "dtype"),
    list(zip(FAMILIES, cycle([torch.float32, torch.bfloat16]), strict=False)),
)
def test_stages_with_other_layers_have_the_same_hashes(model_folder, family, dtype):
    info = describe(str(model_folder(family)))
    first = output_hashes(load_stage(info, 2, dtype, "cpu"))
    assert first == output_hashes(load_stage(info, info.num_layers, dtype, "cpu", first=2))
    assert len(set(first.values())) == len(first) == 10


@pytest.mark.parametrize(
    "family", [name if name == "apertus" else pytest.param(name, marks=nightly) for name in SUPPORTED]
)
def test_stages_of_every_family(family, tmp_path):
    """Apertus has tensors in its layers that are no parameters."""
    Specimen(family).build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    info = describe(str(tmp_path))
    first = output_hashes(load_stage(info, 2, torch.float32, "cpu"))
    assert first == output_hashes(load_stage(info, info.num_layers, torch.float32, "cpu", first=2))


def test_compiled_stages_too():
    info = describe("demo")
    code = compile_ahead(info, torch.float32, "cpu", (PassKind.ONE, PassKind.SEVERAL))
    first = output_hashes(load_stage(info, 6, torch.float32, "cpu", code))
    assert first == output_hashes(load_stage(info, 12, torch.float32, "cpu", code, first=6))
    library = output_hashes(load_stage(info, 6, torch.float32, "cpu"))
    different = {name for name in library if first[name] != library[name]}
    assert different == {name for name in library if "one token" in name or "head" in name}, "prompts are the library's"
    assert {name for name in first if "tokens behind" in name} == first.keys() - library.keys()


def test_a_prompts_whole_chunk_and_what_stands_behind_it_are_hashed():
    """A kernel may be another one from so many rows on."""
    hashes = output_hashes(load_stage(describe("demo"), 6, torch.float32, "cpu"))
    most = sum(PROMPT_CHUNKS[:2]) + PROMPT_CHUNKS[-1]
    assert {f"a layer over {most} tokens", f"a layer over one token behind {most}"} < hashes.keys()


def test_products_with_weights_that_bfloat16_lacks_are_hashed(monkeypatch):
    """Compiled code reads these otherwise than those of the demo model, which are all in bfloat16."""
    info = describe("demo")
    code = compile_ahead(info, torch.float32, "cpu", (PassKind.ONE, PassKind.SEVERAL))
    ours = output_hashes(load_stage(info, 6, torch.float32, "cpu", code))
    monkeypatch.setattr(passes, "in_half_the_memory", lambda weight: in_tiles(weight.to(torch.bfloat16)))
    rounding = output_hashes(load_stage(info, 6, torch.float32, "cpu", code))
    different = {name for name in ours if ours[name] != rounding[name]}
    assert different == {name for name in ours if "behind" in name}, "what runs in compiled code, but for the head"


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="there are no other instructions")
def test_other_instructions_have_other_hashes():
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    other = json.loads(subprocess.check_output([sys.executable, "-c", HASHES], env=environment))
    ours = output_hashes(load_stage(describe("demo"), 6, torch.float32, "cpu"))
    assert any(name.startswith("a layer") for name in ours if ours[name] != other[name])


def test_other_weights_in_the_head_have_other_hashes(model_folder):
    ours, other = (
        output_hashes(load_stage(describe(str(model_folder("llama", seed=seed))), 2, torch.float32, "cpu"))
        for seed in (0, 1)
    )
    assert {name for name in ours if ours[name] != other[name]} == {name for name in ours if "head" in name}


@pytest.mark.parametrize("guess_vocab", [20, 299])
def test_a_boundary_that_guesses_among_some_tokens_is_held_to_its_layers(model_folder, guess_vocab):
    """Its head decides no token, and has other rows than the last stage's, or other code."""
    runtime = PPDRuntime(
        str(model_folder("llama")), stages=2, guess_vocab=guess_vocab, transport="local", dtype="float32"
    )
    last, boundary = (Worker(spec).bits() for spec in runtime._specs)
    assert not boundary.different(last)
    assert last.hashes.keys() - boundary.hashes.keys() == {name for name in last.hashes if "head" in name} != set()


def bits(host, **hashes):
    return Bits(f"{host}: a processor", hashes)


PAPER, STAGES = PaperLayout(2, 2, 2), StagedLayout((1, 2), 1, 3)


@pytest.mark.parametrize("layout", [PAPER, STAGES])
def test_who_differs_is_refused_and_both_are_named(layout):
    handshake = BitHandshake(layout)
    handshake.check(DECIDER, bits("a", layer="1", head="2"))
    handshake.check(1, bits("b", layer="1", head="2", more="3"))
    with pytest.raises(RuntimeError) as refused:
        handshake.check(2, bits("c", layer="1", head="4"))
    whom = "stage 3" if layout == STAGES else "the main process"
    assert str(refused.value).startswith(f"it computes other bits than {whom} (head)")
    assert f"it runs on c: a processor; {whom} on a: a processor; give" in str(refused.value)
    handshake.check(2, bits("d", layer="1", head="2"))


def test_whoever_is_there_first_is_who_others_are_held_to_until_the_main_process_is():
    handshake = BitHandshake(PAPER)
    handshake.check(1, bits("b", layer="1"))
    with pytest.raises(RuntimeError, match="than sub-process 1 .*runs on c"):
        handshake.check(2, bits("c", layer="2"))
    with pytest.raises(RuntimeError, match="than sub-process 1 .*runs on a"):
        handshake.check(DECIDER, bits("a", layer="2"))


def test_a_new_main_process_is_held_to_the_first_one():
    handshake = BitHandshake(PAPER)
    handshake.check(DECIDER, bits("a", layer="1"))
    with pytest.raises(RuntimeError, match="than its first start .*runs on b: .*; its first start on a: "):
        handshake.check(DECIDER, bits("b", layer="2"))
    handshake.check(DECIDER, bits("c", layer="1"))


GOOD = {"location": "", "bits": {"machine": "a", "hashes": {"layer": "0"}}}


def test_an_answer_is_read():
    assert read_answer(json.dumps(GOOD)) == ("", Bits("a", {"layer": "0"}))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"location": "x"},
        [],
        GOOD | {"bits": {"machine": "two\nlines", "hashes": {}}},
        GOOD | {"bits": {"machine": "a" * 10_000, "hashes": {}}},
        GOOD | {"bits": {"machine": "a", "hashes": {str(n): "0" for n in range(1000)}}},
        GOOD | {"bits": {"machine": "a", "hashes": ["0"]}},
        GOOD | {"bits": {"machine": "a", "hashes": {"layer": 7}}},
    ],
    ids=lambda answer: json.dumps(answer)[:40],
)
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises(RuntimeError, match="its answer cannot be read"):
        read_answer(json.dumps(answer))
