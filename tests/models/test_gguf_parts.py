"""GGUF models in several files: any of them opens all; one that lacks or does not belong to the others is named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import Stored, model_parts, write_gguf, write_parts

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint

pytestmark = pytest.mark.usefixtures("own_gguf_cache")
ModelFolder = Callable[..., Path]


@pytest.fixture
def parts(model_folder: ModelFolder, tmp_path: Path) -> list[Path]:
    return write_parts(tmp_path, *model_parts(model_folder("llama"), "F32"), 3)


def test_any_part_opens_all(parts: list[Path], model_folder: ModelFolder, tmp_path: Path) -> None:
    infos = [describe(str(part)) for part in parts]
    assert len({info.folder for info in infos}) == 1
    whole = write_gguf(tmp_path / "whole.gguf", *model_parts(model_folder("llama"), "F32"))
    assert model_fingerprint(infos[0]) == model_fingerprint(describe(str(whole)))
    texts = [OrdinaryDecoding(str(file)).generate("a fox", max_new_tokens=8).token_ids for file in (parts[1], whole)]
    assert texts[0] == texts[1]


def test_a_part_that_changes_changes_the_model(parts: list[Path], model_folder: ModelFolder, tmp_path: Path) -> None:
    first = describe(str(parts[0]))
    (tmp_path / "other").mkdir()
    others = write_parts(tmp_path / "other", *model_parts(model_folder("llama", seed=1), "F32"), 3)
    shutil.copy(others[2], parts[2])
    second = describe(str(parts[0]))
    assert second.folder != first.folder
    assert model_fingerprint(second) != model_fingerprint(first)


def refused(file: Path, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        describe(str(file))
    assert str(caught.value).startswith(f"model {str(file)!r} ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_part_that_lacks_is_named(parts: list[Path], lacks: int) -> None:
    parts[lacks].unlink()
    refused(parts[2], f"lacks its part {parts[lacks].name}, which has to lie beside the others$")


def test_a_part_that_is_not_there_is_no_file(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ValueError, match="no such GGUF file here"):
        describe(str(parts[1]))


def test_parts_that_contradict_each_other_are_named(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[1], tmp_path / "kept")
    shutil.copy(parts[2], parts[1])
    refused(parts[0], f"has a part, {parts[1].name}, that is part 2 of 3 by its name, and not by what it says$")
    shutil.copy(tmp_path / "kept", parts[1])
    parts[2].write_bytes(parts[2].read_bytes()[:-40])
    refused(parts[0], f"has a part, {parts[2].name}, that is cut short: tensor .* lies beyond its end$")
    parts[2].write_bytes(b"")
    refused(parts[0], f"has a part, {parts[2].name}, that is no GGUF file$")
    alone = tmp_path / "alone.gguf"
    shutil.copy(tmp_path / "kept", alone)
    refused(alone, r"is one of 3 parts; give it its name, NAME-00001-of-00003\.gguf$")


def test_parts_with_the_same_tensor_or_too_few_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    metadata, tensors = model_parts(model_folder("llama"), "F32")
    paths = write_parts(tmp_path, metadata, tensors, 2)
    name, one = next(iter(tensors.items()))
    about = {"split.no": 1, "split.count": 2}
    twice: dict[str, Stored] = {name: one}
    write_gguf(paths[1], about, twice)
    refused(paths[0], f"has a part, {paths[1].name}, that has the tensor {name!r} of another part$")
    write_gguf(paths[1], about, {"blk.9.attn_q.weight": one})
    refused(paths[0], r"is damaged: its parts have \d+ tensors, not as many as they say$")


def test_a_whole_file_with_a_parts_name_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    parts = model_parts(model_folder("llama"), "F32")
    files = [write_gguf(tmp_path / f"model-0000{number}-of-00002.gguf", *parts) for number in (1, 2)]
    refused(files[0], f"has a part, {files[0].name}, that is part 1 of 2 by its name, and not by what it says$")
