"""A draft model: its logits are its own model's for any chain, nothing runs twice, and who has another vocabulary."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import write_model
from torch import Tensor

from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.draft_model import DraftModel, DraftModelInfo, describe_draft_model, load_draft_model

ModelFolder = Callable[..., Path]


def logits_of(info: ModelInfo, text: list[int]) -> Tensor:
    """What the model says behind a text that it runs at once."""
    stage = load_stage(info, info.num_layers, torch.float32, "cpu")
    stage.begin(len(text))
    return stage.logits(stage.run(0, info.num_layers, text, 0))


@pytest.fixture(params=["llama", "mistral", "gguf", "int4"])
def draft(request: pytest.FixtureRequest, model_folder: ModelFolder, tmp_path: Path) -> DraftModelInfo:
    """A small model of each way to be stored; mistral has a window shorter than the text."""
    kind = request.param
    folder = model_folder("llama" if kind in ("gguf", "int4") else kind, num_layers=2, seed=1)
    if kind == "gguf":
        folder = write_model(tmp_path / "few.gguf", folder, "Q8_0")
    elif kind == "int4":
        quantise_model(str(folder), tmp_path / "few", "int4")
        folder = tmp_path / "few"
    return describe_draft_model(str(folder), describe(str(model_folder("llama", num_layers=4))))


def test_logits_of_any_chain_are_the_models(draft: DraftModelInfo) -> None:
    """Whatever ran before, came true or did not."""
    model, drawn = load_draft_model(draft, "cpu"), random.Random(0)
    other = model.another()
    for turn in (model, other):
        turn.begin(120)
    texts = {turn: [drawn.randrange(300) for _ in range(9)] for turn in (model, other)}
    for turn, text in texts.items():
        turn.follow(text)
    for step in range(12):
        for turn, text in texts.items():
            chains = [[drawn.randrange(2) for _ in range(drawn.randrange(5))] for _ in range(4)]
            found = turn.draft(chains)
            if step % 4 == 0:
                for chain, logits in zip(chains, found, strict=True):
                    torch.testing.assert_close(logits, logits_of(draft.info, text + chain), rtol=1e-3, atol=1e-3)
            certain = [drawn.randrange(2) for _ in range(1 + drawn.randrange(3))]
            turn.follow(certain)
            text.extend(certain)


def of_one(model_folder: ModelFolder, **settings: object) -> DraftModel:
    folder = model_folder("llama", num_layers=2, seed=1, **settings)
    model = load_draft_model(describe_draft_model(str(folder), describe(str(folder))), "cpu")
    model.begin(200)
    return model


def test_nothing_runs_twice(model_folder: ModelFolder) -> None:
    """A chain's beginning, a branch left for another one, and guesses that come true."""
    model = of_one(model_folder)
    model.follow([5, 6, 7])
    run = model._stage.layer_passes
    for chain in ([1], [1, 2], [1, 2, 3], [9], [1, 2, 3], [1, 2, 4]):
        model.draft([chain])
    assert model._stage.layer_passes == run + 2 * 5
    model.follow([1, 2])
    model.draft([[3], [4]])
    assert model._stage.layer_passes == run + 2 * 5
    model.follow([8])
    model.draft([[]])
    assert model._stage.layer_passes == run + 2 * 6


def test_more_guesses_than_there_is_room_for(model_folder: ModelFolder) -> None:
    model = of_one(model_folder)
    model.follow([5, 6, 7])
    first = model.draft([[]])
    for token in range(290):
        model.draft([[token, 3]])
    assert torch.equal(model.draft([[]]), first)
    assert not model.draft([[1] * 129]).any(), "no longer chain"


def test_a_text_longer_than_the_model_can_read(model_folder: ModelFolder) -> None:
    """It names nothing then, whatever comes, until the next text."""
    model = of_one(model_folder, max_position_embeddings=16)
    model.follow([1] * 14)
    assert model.draft([[2, 3]]).any()
    assert not model.draft([[2, 3, 4]]).any()
    for token in (2, 3, 4, 5):
        model.follow([token])
        assert model.draft([[]]).any() == (token < 4)
    model.begin(20)
    model.follow([1])
    assert model.draft([[]]).any()


def test_a_shortlist(model_folder: ModelFolder) -> None:
    folder = str(model_folder("llama", num_layers=2, seed=1))
    info = describe(folder)
    model = load_draft_model(DraftModelInfo(info, 300, shortlist=(3, 50, 299)), "cpu")
    model.begin(200)
    model.follow([5, 6])
    torch.testing.assert_close(model.draft([[7]])[0], logits_of(info, [5, 6, 7])[[3, 50, 299]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("own", "others"), [(300, 320), (320, 300)])
def test_heads_may_have_more_rows_than_there_are_tokens(model_folder: ModelFolder, own: int, others: int) -> None:
    """Where the tokenizers are the same; tokens that only one model has are never named, and may be read."""
    info = describe(str(model_folder("llama", num_layers=2, vocab_size=own)))
    draft = describe_draft_model(str(model_folder("llama", num_layers=2, vocab_size=others)), info)
    model = load_draft_model(draft, "cpu")
    model.begin(200)
    model.follow([own - 1, 7])
    assert model.draft([[own - 1]]).shape == (1, 300)


def with_vocabulary(folder: Path, change: Callable[[dict[str, int]], dict[str, int]]) -> Path:
    """Change a folder's texts of tokens."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = change(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def exchanged(vocabulary: dict[str, int]) -> dict[str, int]:
    return vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}


def test_another_vocabulary_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    own, larger = model_folder("llama", num_layers=4), model_folder("llama", num_layers=2, vocab_size=320)
    info = describe(str(own))
    changed = with_vocabulary(shutil.copytree(own, tmp_path / "changed"), exchanged)
    with pytest.raises(ValueError, match=r"^drafter='.*': has another vocabulary than model '.*' \(token 'a' is \d+,"):
        describe_draft_model(str(changed), info)
    unnamed = shutil.copytree(larger, tmp_path / "unnamed")
    (unnamed / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"another vocabulary than model '.*' \(320 tokens, not 300\); give a smaller"):
        describe_draft_model(str(unnamed), info)


def test_what_is_no_model_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    info = describe(str(model_folder("llama", num_layers=4)))
    for name in (str(tmp_path), str(tmp_path / "nothing"), str(tmp_path / "nothing.gguf")):
        with pytest.raises(ValueError, match=r"^drafter='.*': no folder .*, or model that can draft: "):
            describe_draft_model(name, info)
