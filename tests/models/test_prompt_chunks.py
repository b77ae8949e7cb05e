"""Prompts of several chunks: layouts compute ordinary decoding's bits, and methods its tokens, the library's."""

from pathlib import Path

import pytest
from families.attack import LAYOUTS, METHODS, Attack, prompts
from families.specimens import BORDER, MOST_POSITIONS, SPECIAL, SUPPORTED, UNUSUAL, Specimen, overlooked_windows
from grids import nightly
from models_for_tests import FAMILIES
from pipeline_runs import PROMPTS, SAMPLED, Bench, same

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.stage import chunks
from ppd_runtime.models.stage.chunks import ONE_PASS, PROMPT_CHUNKS, is_whole, prompt_chunks

CHUNK = 5
OVERLOOKED = list(overlooked_windows(SUPPORTED))
ODD = [specimen for specimen in SPECIAL if "longrope" in specimen.kind or "overlooked layer" in specimen.kind]
WHOLE = [*ODD, OVERLOOKED[0]]
_CUT_KINDS = "dynamic rotary", "window of 5", "soft caps", "as E2B has them"
CUT = [next(one for one in SPECIAL if one.kind == kind) for kind in _CUT_KINDS]
AWKWARD = WHOLE[-3:]
LENGTH = BORDER + 1
"""Many chunks."""


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if prompts were cut far shorter."""
    monkeypatch.setattr(chunks, "ONE_PASS", CHUNK)
    monkeypatch.setattr(chunks, "PROMPT_CHUNKS", (CHUNK, CHUNK))


def test_borders_lie_where_they_do_whatever_the_length():
    assert prompt_chunks(0) == []
    assert prompt_chunks(1) == [range(1)]
    first, second, *_, last = PROMPT_CHUNKS
    assert prompt_chunks(first) == [range(first)]
    assert prompt_chunks(ONE_PASS) == [range(ONE_PASS)]
    assert [*map(is_whole, prompt_chunks(first)), *map(is_whole, prompt_chunks(ONE_PASS))] == [True, False]
    assert prompt_chunks(ONE_PASS + 1) == [range(first), range(first, ONE_PASS + 1)]
    assert prompt_chunks(first + second + 1) == [
        range(first),
        range(first, first + second),
        range(first + second, first + second + 1),
    ]
    assert prompt_chunks(2 * first, longest=2 * first - 1) == [range(2 * first)]
    many = prompt_chunks(sum(PROMPT_CHUNKS) + 3 * last - 1)
    assert list(map(len, many)) == [*PROMPT_CHUNKS, last, last, last - 1]
    assert list(map(is_whole, many)) == [True] * (len(many) - 1) + [False]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "float32") for family in FAMILIES), ("llama", "bfloat16"), ("gemma2", "bfloat16")]
)
def test_layouts_have_ordinary_decodings_bits(model_folder, family, dtype):
    """Stages for each family, and the paper's layout by turns."""
    bench = Bench.of(model_folder(family), dtype)
    prompt = bench.prompt_ids(PROMPTS[-1])
    assert len(prompt) > 4 * CHUNK
    expected = bench.ordinary(prompt, SAMPLED)
    if FAMILIES.index(family) % 2 == (dtype == "float32"):
        same(bench.pipelined(prompt, SAMPLED, k=2, exit_layer=3), expected)
    else:
        same(bench.pipelined(prompt, SAMPLED, k=1, exit_layer=2, run_ahead=True), expected)
    same(bench.staged(prompt, SAMPLED, (1, 3), k=2, rows=2, seed=3), expected)


def test_the_chunk_is_part_of_what_the_bits_are(model_folder, monkeypatch):
    """So it may differ nowhere."""
    bench = Bench.of(model_folder("llama"))
    prompt = bench.prompt_ids(PROMPTS[-1])
    whole = bench.ordinary(prompt, SAMPLED)
    monkeypatch.setattr(chunks, "ONE_PASS", CHUNK)
    monkeypatch.setattr(chunks, "PROMPT_CHUNKS", (CHUNK, CHUNK))
    cut = bench.ordinary(prompt, SAMPLED)
    assert cut.tokens == whole.tokens
    assert not all(a.equal(b) for a, b in zip(cut.decisive, whole.decisive, strict=True))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("specimen", [*WHOLE, *CUT], ids=lambda specimen: specimen.name)
def test_the_library_gives_the_same_tokens(specimen: Specimen, tmp_path: Path) -> None:
    """Of one pass over all of the prompt, across the border of rotary tables too."""
    attack = Attack.on(specimen, tmp_path)
    attack.against_transformers(prompts([LENGTH]))
    assert not attack.differences


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("specimen", AWKWARD, ids=lambda specimen: specimen.name)
def test_layouts_agree_on_what_stays_whole(specimen: Specimen, tmp_path: Path) -> None:
    """Though the layers of a stage alone may not say so."""
    attack = Attack.on(specimen, tmp_path)
    attack.against_ordinary(prompts([LENGTH]), ["k=1", "a stage a layer"], [])
    assert not attack.differences


@pytest.mark.parametrize("specimen", [*WHOLE, *CUT], ids=lambda specimen: specimen.name)
def test_what_stays_whole_is_found_without_weights(specimen: Specimen, tmp_path: Path) -> None:
    specimen.config().save_pretrained(tmp_path)
    longest = {"longrope": BORDER, "overlooked": 0, "dynamic": MOST_POSITIONS}
    expected = next((tokens for word, tokens in longest.items() if word in specimen.kind), None)
    assert describe(str(tmp_path), needs_weights=False).longest_in_chunks == expected


@pytest.mark.usefixtures("short_chunks")
def test_every_method_has_ordinary_decodings_tokens(tmp_path: Path) -> None:
    attack = Attack.on(Specimen("llama"), tmp_path)
    attack.against_ordinary(prompts([4 * CHUNK + 1]), [], list(METHODS))
    assert attack.runs == 2 * len(METHODS)
    assert not attack.differences


@nightly
@pytest.mark.parametrize("specimen", UNUSUAL, ids=lambda specimen: specimen.name)
def test_chunks_of_unusual_layers(specimen: Specimen, tmp_path: Path) -> None:
    """With the borders that there are."""
    longer = Specimen(specimen.family, specimen.kind, {**specimen.settings, "max_position_embeddings": 512})
    attack, asked = Attack.on(longer, tmp_path, new_tokens=6), prompts([ONE_PASS + 1, sum(PROMPT_CHUNKS[:2]) + 1])
    attack.against_transformers(asked)
    attack.against_ordinary(asked, ["k=1, running ahead", "a stage a layer"], ["layerskip"])
    assert not attack.differences


@nightly
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("specimen", [*map(Specimen, SUPPORTED), *SPECIAL, *OVERLOOKED], ids=lambda s: s.name)
def test_everything(specimen: Specimen, tmp_path: Path) -> None:
    """Every family, layout and method."""
    attack = Attack.on(specimen, tmp_path)
    attack.against_transformers(prompts())
    attack.against_ordinary(prompts(), list(LAYOUTS), list(METHODS))
    assert not attack.differences
