"""The adapter and the probe that the demo model brings along; heads and drafter that ship for SmolLM2."""

import json
import shutil
from pathlib import Path

import pytest
from smollm2 import needs_smollm2

from ppd_runtime import OrdinaryDecoding, PPDRuntime, open_method
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.packages import SMOLLM2, packaged_file
from ppd_runtime.models.trained.adapter import AdapterInfo
from ppd_runtime.models.trained.kept_heads import SHIPPED, folder_name, kept_drafter, kept_heads
from ppd_runtime.models.trained.parts import PartInfo, describe_part
from ppd_runtime.models.trained.probe import ProbeInfo
from tools import ship_parts

DEMO = describe("demo")
PROMPTS = ("import os\n", "class Stack:\n    def push(self, item):\n", "def main(argv):\n    parser = ")


@pytest.mark.parametrize("part", [AdapterInfo, ProbeInfo])
def test_they_are_the_demo_models_own(part: type[PartInfo]) -> None:
    known = describe_part(part, DEMO.folder / part.NAME, DEMO)
    assert (known.model, known.hidden_size, known.vocab_size) == ("demo", 256, DEMO.vocab_size)
    card = json.loads((known.folder / known.card_name()).read_text())
    assert (card["training"]["data"], card["training"]["model_fingerprint"]) == ("demo", model_fingerprint(DEMO))
    assert sum(path.stat().st_size for path in known.folder.iterdir()) < 2 * 2**20
    readme = (DEMO.folder / "README.md").read_text()
    assert f"`{part.NAME}/`" in readme


def test_what_their_cards_say_is_in_the_readme() -> None:
    readme = (DEMO.folder / "README.md").read_text()
    adapter, probe = (
        json.loads((DEMO.folder / name / f"{name}.json").read_text())["training"]["held_out"]
        for name in ("adapter", "probe")
    )
    rates = [adapter[when]["match_rates"]["greedy"]["1"] for when in ("before", "after")]
    assert f"{rates[0]:.3f} to {rates[1]:.3f}" in readme
    for forecast in (probe["probe"], probe["confidence"]):
        assert f"{forecast['accuracy']:.3f}" in readme
        assert f"{forecast['auc']:.3f}" in readme


def test_a_probe_for_another_layer_than_the_adapters_is_refused() -> None:
    message = "the probe is for layer 4, the adapter for layer 3; give probe=FOLDER with one for that layer .`ppd train"
    with pytest.raises(ValueError, match=message):
        open_method("demo", "kangaroo", stopping="probe")


@pytest.mark.parametrize(("method", "settings"), [("kangaroo", {}), ("adaspeed", {"stopping": "probe"})])
def test_tokens_are_ordinary_decodings(method: str, settings: dict[str, object]) -> None:
    """In float32; and drafts are accepted."""
    ordinary = OrdinaryDecoding("demo", dtype="float32")
    drafting = open_method("demo", method, dtype="float32", **settings)
    accepted = 0
    for prompt, sampling in zip(PROMPTS, ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 5}, {}), strict=True):
        expected = ordinary.generate(prompt, max_new_tokens=20, ignore_eos=True, **sampling)
        result = drafting.generate(prompt, max_new_tokens=20, ignore_eos=True, **sampling)
        assert result.token_ids == expected.token_ids
        accepted += result.stats.hits
    assert accepted > 3 * 20 / 4


@needs_smollm2
def test_a_packaged_model_has_the_same_fingerprint_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = folder_name(describe(SMOLLM2))
    shutil.copy(packaged_file(SMOLLM2), tmp_path / "another.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert folder_name(describe(str(tmp_path / "another.gguf"))) == expected


@needs_smollm2
def test_smollm2_brings_heads_and_a_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make parts` makes them again if this model's fingerprint is another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    info, drafter = describe(SMOLLM2), kept_drafter(describe(SMOLLM2))
    folder = SHIPPED / folder_name(info)
    assert drafter is not None
    assert drafter.folder.parent == folder
    assert kept_heads(info).heads.keys() == {7, 15, 22}
    assert [place for place in SHIPPED.iterdir() if place != folder] == []
    with PPDRuntime(SMOLLM2, k=3, transport="local") as runtime:
        (sub, *_) = runtime._specs[1:]
        assert (runtime.exit_layer, sub.exit_head.folder) == (15, folder / "layer-15")
        assert sub.guess_tokens == drafter.tokens
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= ship_parts.MOST_BYTES
    report = json.loads((folder / ship_parts.REPORT).read_text())
    assert (folder / ship_parts.CARD).read_text() == ship_parts.card(report)
