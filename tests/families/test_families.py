"""Every decoder that transformers has and the loader accepts gives its library's tokens, in every layout and method."""

import logging
import re
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from families.__main__ import page, refusal, without
from families.attack import LAYOUTS, METHODS, SAMPLED, Attack, prompts
from families.specimens import (
    BORDER,
    SPECIAL,
    SUPPORTED,
    WRAPPED,
    Specimen,
    every_family,
    overlooked_windows,
)
from transformers import CONFIG_MAPPING

from ppd_runtime import open_method
from ppd_runtime.models.checkpoint.description import describe

OVERLOOKED = list(overlooked_windows(SUPPORTED))
ALL = [*map(Specimen, every_family()), *SPECIAL, *OVERLOOKED, *WRAPPED]
WITH_WINDOWS = set(SUPPORTED) - {specimen.family for specimen in OVERLOOKED}
_FIRST = [one for i, one in enumerate(SPECIAL) if "window" in one.kind or one.kind not in {e.kind for e in SPECIAL[:i]}]
_SMALL_WINDOWS = {one.family for one in SPECIAL if "window of" in one.kind}
QUICK = [*_FIRST, *OVERLOOKED, *map(Specimen, sorted(WITH_WINDOWS - _SMALL_WINDOWS)), *WRAPPED[::2]]
"""By day: the first family of each special configuration, and each family, with a window that texts outgrow."""
ALONE = [name for name, settings in LAYOUTS.items() if "workers" not in settings]
"""Layouts whose passes have one row, or rows that keep their bits."""
BFLOAT16 = [*range(0, len(QUICK), 16)]
"""Of `QUICK`, those that run in bfloat16 by day too."""
_PAIRS = list(zip(cycle(LAYOUTS), islice(cycle(METHODS), 30), strict=False))


@pytest.fixture(autouse=True)
def _no_advice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def attack_or_skip(specimen: Specimen, folder: Path, dtype: str = "float32") -> Attack:
    """The attack; a specimen that is refused is another test's."""
    try:
        return Attack.on(specimen, folder, dtype)
    except Exception as error:  # noqa: BLE001 (the library's own refusals have every type there is)
        pytest.skip(f"{specimen.name}: {' '.join(str(error).split())[:200]}")


@pytest.mark.parametrize("number", range(len(QUICK)), ids=[specimen.name for specimen in QUICK])
def test_a_layout_and_a_method(number: int, tmp_path: Path) -> None:
    """Each with one of each, in turn, on a text that outgrows windows, and crosses a border if there is one.

    One of the two is greedy, the other one sampled. Families without windows have one in their configuration that their
    code overlooks.
    """
    attack = Attack.on(QUICK[number], tmp_path, new_tokens=8)
    layout, method = _PAIRS[number % len(_PAIRS)]
    samplings = ({}, SAMPLED) if number // len(LAYOUTS) % 2 else (SAMPLED, {})
    border = QUICK[number].border
    asked = prompts([border - 6 if border else 17])
    attack.against_transformers(asked)
    attack.against_ordinary(asked, [layout], [], samplings[:1])
    attack.against_ordinary(asked, [], [method], samplings[1:])
    assert attack.runs >= 2
    assert not attack.differences


@pytest.mark.nightly
@pytest.mark.parametrize("specimen", ALL, ids=lambda specimen: specimen.name)
def test_everything(specimen: Specimen, tmp_path: Path) -> None:
    """Every prompt, layout and method."""
    attack = attack_or_skip(specimen, tmp_path)
    attack.against_transformers(prompts())
    attack.against_ordinary(prompts(), list(LAYOUTS), list(METHODS))
    assert not attack.differences


@pytest.mark.nightly
@pytest.mark.parametrize("specimen", ALL, ids=lambda specimen: specimen.name)
def test_bfloat16(specimen: Specimen, tmp_path: Path) -> None:
    """One token a pass, whose bits are ordinary decoding's: all layouts with a worker for each candidate."""
    attack = attack_or_skip(specimen, tmp_path, "bfloat16")
    attack.against_ordinary(prompts((5, 17, BORDER - 6)), ALONE, [])
    assert not attack.differences


@pytest.mark.parametrize("number", BFLOAT16, ids=[QUICK[number].name for number in BFLOAT16])
def test_a_layout_in_bfloat16(number: int, tmp_path: Path) -> None:
    """Some of the families and configurations, each layout in turn; in the night all of them."""
    attack = Attack.on(QUICK[number], tmp_path, "bfloat16")
    attack.against_ordinary(prompts([17]), [ALONE[number // 16 % len(ALONE)]], [])
    assert attack.runs == 2
    assert not attack.differences


GUIDE = Path(__file__).parents[2] / "docs" / "families.md"


def test_the_guide_names_these_families_and_configurations() -> None:
    """All of the page but the reasons."""
    reasons = re.compile(r"(?<=` \|).*", flags=re.MULTILINE)
    expected = page(lambda _: "", lambda _: "")
    assert reasons.sub("", GUIDE.read_text()) == reasons.sub("", expected)


@pytest.mark.parametrize(
    "family", ["cohere_compass_text", "dbrx", "inkling2_text", "minimax", "nanochat", "zamba", "zamba2"]
)
def test_a_stop_in_the_librarys_code_is_told_in_words(family: str) -> None:
    """The guide and the error say the same, and no Python."""
    reason = refusal(Specimen(family))
    assert f"| `{family}` | {reason} |\n" in GUIDE.read_text()
    assert not re.search(r"object has|<class|Expected|definition of|got |^'", reason)


@pytest.mark.nightly
def test_the_guide_is_what_is_written() -> None:
    """With the reasons."""
    assert GUIDE.read_text() == page(refusal, without)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "later tokens"),
        ("qwen4_exp_text", {}, "an index, whose own keys"),
        ("hy_v4", {}, "that another layer has chosen"),
        ("glm_moe_dsa", {"index_topk_freq": 2}, "that another layer has chosen"),
        ("deepseek_v32", {"index_topk": -1}, "index_topk=-1"),
        ("gemma4_text", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}, "only with per-layer inputs"),
        ("llama", {"layer_types": ["chunked_attention"] * 32, "attention_chunk_size": 5}, "than their caches say"),
        ("nanochat", {}, "cannot be cut"),
        ("minicpm3", {}, "cannot be cut"),
        ("rwkv", {}, "such as Llama"),
    ],
)
def test_families_that_cannot_be_cut_are_refused_before_weights_are_read(
    family: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """By `config.json` alone, in a line that names the family and says why, without the name of an exception."""
    CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"\({family}\)") as refused:
        describe(str(tmp_path))
    assert "\n" not in str(refused.value)
    assert reason in str(refused.value)
    assert "Error: " not in str(refused.value)


@pytest.mark.parametrize(
    ("specimen", "reason"),
    [
        (Specimen("gpt_oss"), "layer 1 does not run without its mlp"),
        (Specimen("jetmoe"), "layer 1 has no attention"),
        *((Specimen("llama", "", {"num_hidden_layers": n}), f"it has too few layers, {n}, at least 3") for n in (1, 2)),
    ],
    ids=str,
)
def test_swift_is_refused_where_nothing_can_be_left_out(specimen: Specimen, reason: str, tmp_path: Path) -> None:
    """Before weights are read: there are none but a file of that name."""
    specimen.config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    refused = (
        rf"^swift cannot run model '.*{tmp_path.name}' \({specimen.family}\): {reason}.*choose another method or model$"
    )
    with pytest.raises(ValueError, match=refused):
        open_method(str(tmp_path), "swift", bayes_interval=0)
