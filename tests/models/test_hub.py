"""Hub models: pinned to a commit, safetensors only, and no code of theirs is ever run; with a local hub cache."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from real_files.hub_cache import NEW, OLD, fill, of_folder
from transformers import AutoModelForCausalLM

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.description import describe, load_tokenizer

NAME = "somebody/small"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path]) -> Path:
    """A hub cache as huggingface_hub keeps it: two commits of one model, the branch main is at the newer one."""
    repository = tmp_path / "hub" / "models--somebody--small"
    for commit, seed in ((OLD, 1), (NEW, 2)):
        shutil.copytree(model_folder(num_layers=2, seed=seed), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    for ref, commit in (("main", NEW), ("v1", OLD)):
        (repository / "refs" / ref).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(repository.parent))
    return repository


@pytest.mark.parametrize(
    ("asked", "commit"),
    [(NAME, NEW), (f"{NAME}@main", NEW), (f"{NAME}@v1", OLD), (f"{NAME}@{OLD}", OLD), (f"{NAME}@{NEW}", NEW)],
)
def test_a_revision_is_pinned_and_kept_in_the_name(hub: Path, asked: str, commit: str) -> None:
    info = describe(asked)
    assert info.folder == hub / "snapshots" / commit
    assert info.name == f"{NAME}@{commit}", "what cards and reports say"
    assert describe(info.name) == info, "and what finds it again"


def test_revisions_are_different_models(hub: Path) -> None:
    old, new = (OrdinaryDecoding(f"{NAME}@{commit}") for commit in (OLD, NEW))
    prompt = [3, 4, 5]
    assert old.generate(prompt, max_new_tokens=8).token_ids != new.generate(prompt, max_new_tokens=8).token_ids
    with PPDRuntime(f"{NAME}@v1", k=1, transport="local") as runtime:
        expected = old.generate(prompt, max_new_tokens=8).token_ids
        assert runtime.generate(prompt, max_new_tokens=8).token_ids == expected


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (f"{NAME}@{'a' * 40}", "neither a folder here nor a model that the hub gave"),
        (f"{NAME}@", "'' is no revision; give a branch, a tag or a commit behind the @"),
        (f"{NAME}@ main", "' main' is no revision"),
        (f"{NAME}@a@b", "'a@b' is no revision"),
        (f"{NAME}@../../x", "no model|is no revision|neither a folder"),
    ],
)
def test_revisions_that_there_are_not_are_refused(hub: Path, asked: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        describe(asked)
    assert asked in str(error.value)
    assert "\n" not in str(error.value)


def test_other_weights_than_safetensors_are_refused(hub: Path) -> None:
    folder = hub / "snapshots" / NEW
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no safetensors weights; convert or download them first"):
        describe(NAME)


def test_only_data_is_fetched(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def note(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(hub / "snapshots" / OLD)

    monkeypatch.setattr("huggingface_hub.snapshot_download", note)
    describe(f"{NAME}@v1")
    patterns = asked.pop("allow_patterns")
    assert asked == {"name": NAME, "revision": "v1"}
    assert set(patterns) == {"*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"}


def add_code(folder: Path, file: str, **fields: object) -> Path:
    """Have a file of settings ask for code that lies beside it; the file that tells of its running."""
    told = folder / "it-ran"
    (folder / "own_code.py").write_text(f"open({str(told)!r}, 'w').close()\nclass Own: pass\n")
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(settings | fields))
    return told


def test_a_model_that_needs_its_own_code_is_refused_in_one_line(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    told = add_code(
        hub / "snapshots" / NEW,
        "config.json",
        model_type="strange",
        auto_map={"AutoConfig": "own_code.Own", "AutoModelForCausalLM": "own_code.Own"},
    )
    with pytest.raises(
        ValueError, match=r"asks for code of its own \(auto_map\), which is never run; give a model"
    ) as e:
        describe(NAME)
    assert "\n" not in str(e.value)
    assert not told.exists()


def test_the_library_s_own_code_runs_where_it_knows_the_architecture(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    expected = OrdinaryDecoding(NAME).generate([3, 4, 5], max_new_tokens=8).token_ids
    own = {"AutoConfig": "own_code.Own", "AutoModelForCausalLM": "own_code.Own"}
    told = add_code(hub / "snapshots" / NEW, "config.json", auto_map=own)
    add_code(hub / "snapshots" / NEW, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own_code.Own", None]})
    assert OrdinaryDecoding(NAME).generate([3, 4, 5], max_new_tokens=8).token_ids == expected
    assert not told.exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    told = add_code(
        hub / "snapshots" / NEW,
        "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["own_code.Own", None]},
    )
    with pytest.raises(ValueError, match="no usable tokenizer"):
        load_tokenizer(describe(NAME))
    assert not told.exists()


BY_PRODUCTS = ("README.md", ".gitattributes", "onnx/config.json", "onnx/model.onnx", "runs/results.json", "eval.json")
"""What repositories have beside a model, and other programs leave there."""
SHARDS = "40KB"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    place = tmp_path / "hub"
    place.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place))
    return place


def whole(cache: Path) -> bool:
    """Whether huggingface_hub itself finds the cache in order."""
    return not huggingface_hub.scan_cache_dir(cache).warnings


def as_from_pretrained(cache: Path, asked: str) -> None:
    """The tokens are those that transformers gives, out of the same cache and just as far from the hub."""
    name, _, revision = asked.partition("@")
    model = AutoModelForCausalLM.from_pretrained(name, revision=revision or None, cache_dir=cache).eval()
    with torch.inference_mode():
        text = model.generate(torch.tensor([[3, 4, 5]]), do_sample=False, max_new_tokens=8)
    ours = OrdinaryDecoding(asked, dtype="float32")
    assert list(ours.generate([3, 4, 5], max_new_tokens=8).token_ids) == text[0, 3:].tolist()
    assert ours.generate("a fox", max_new_tokens=2).token_ids


@pytest.mark.parametrize(
    ("asked", "others", "blob"),
    [
        (NAME, BY_PRODUCTS, "never there"),
        (f"{NAME}@v1", None, "deleted"),
        (f"{NAME}@{NEW}", BY_PRODUCTS, "deleted"),
        (NAME, None, "never there"),
    ],
)
def test_a_missing_shard_is_one_line(cache: Path, model_folder, asked: str, others, blob: str) -> None:
    folder, shard = model_folder(num_layers=2, max_shard_size=SHARDS), "model-00002-of-00004.safetensors"
    listed = others and (*others, shard)
    without = [shard] if blob == "never there" else []
    snapshot = fill(cache, NAME, of_folder(folder, *without), refs=["main", "v1"], others=listed)
    if blob == "deleted":
        (snapshot / shard).resolve().unlink()
    with pytest.raises(ValueError) as caught:
        OrdinaryDecoding(asked)
    fetch = f"fetch it where the hub can be reached, with `hf download {NAME} --revision {NEW}`"
    lacks = f"{snapshot} lacks {shard} (1 of 4 files of weights)"
    assert str(caught.value) == f"model {asked!r}: {lacks}; {fetch}"


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("config.json", "no usable config.json in"),
        ("model.safetensors", "holds no safetensors weights"),
        ("tokenizer.json", "no usable tokenizer in"),
    ],
)
def test_what_else_is_missing_is_one_line(cache: Path, model_folder, missing: str, reason: str) -> None:
    folder = model_folder(num_layers=2)
    fill(cache, NAME, of_folder(folder, missing), others=[*BY_PRODUCTS, missing])
    with pytest.raises(ValueError, match=reason) as caught:
        OrdinaryDecoding(NAME)
    assert NAME in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_the_cache_lacks_are_named(cache: Path, model_folder, caplog: pytest.LogCaptureFixture) -> None:
    """As `from_pretrained`, it runs without; the ends of texts may be others."""
    folder = model_folder(num_layers=2)
    settings = ["generation_config.json", "chat_template.jinja"]
    fill(cache, NAME, of_folder(folder, *settings), others=[*BY_PRODUCTS, *settings])
    as_from_pretrained(cache, NAME)
    assert "lacks generation_config.json, chat_template.jinja, and the hub cannot be reached; fetch it" in caplog.text


def test_a_hub_that_cannot_be_reached_is_as_none(cache: Path, model_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody said beforehand that there is no network."""
    fill(cache, NAME, of_folder(model_folder(num_layers=2)), others=BY_PRODUCTS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert describe(NAME).name == f"{NAME}@{NEW}"
