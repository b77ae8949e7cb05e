"""What every training keeps to: one at a time into a folder, and what is kept beside it is whole or as it was."""

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from heads_for_tests import write_texts
from torch import Tensor, nn

from ppd_runtime.models.trained.heads import AFFINE
from ppd_runtime.training.adapt.answers import Text
from ppd_runtime.training.adapt.states import Reader
from ppd_runtime.training.adapter import AdapterRecipe, AdapterRun
from ppd_runtime.training.exit_head import ExitHeadRun, HeadRecipe
from ppd_runtime.training.layerskip import recipe_for
from ppd_runtime.training.layerskip_run import LayerSkipRun
from ppd_runtime.training.loop import Training
from ppd_runtime.training.parts import PartRun
from ppd_runtime.training.probe import ProbeRecipe, ProbeRun
from ppd_runtime.training.recipe import ExitRecipe
from ppd_runtime.training.run import TrainingRun, alone

ModelFolder = Callable[..., Path]
SAME = {"exit_layer": 1, "learning_rate": 0.01, "batch_size": 4, "max_length": 24, "epochs": 1, "max_steps": 3}


Make = Callable[..., TrainingRun]
"""Makes a training of a model's folder, a file of texts and a folder to be."""


def part(trained: type[PartRun], recipe: Callable[..., ExitRecipe], **own: object) -> Make:
    return lambda model, data, out: trained(str(model), str(data), recipe(**SAME, **own), out, "float32")


def layerskip(from_scratch: bool) -> Make:
    recipe = recipe_for(from_scratch, max_length=24, max_steps=SAME["max_steps"])
    return lambda model, data, out: LayerSkipRun(str(model), str(data), recipe, out, "float32")


TRAININGS: dict[str, Make] = {
    "adapter": part(AdapterRun, AdapterRecipe),
    "probe": part(ProbeRun, ProbeRecipe),
    "exit head": part(ExitHeadRun, HeadRecipe),
    "exit head, affine": part(ExitHeadRun, HeadRecipe, kind=AFFINE),
    "LayerSkip": layerskip(False),
    "LayerSkip from scratch": layerskip(True),
}


@pytest.fixture
def run(model_folder: ModelFolder, tmp_path: Path) -> AdapterRun:
    data = write_texts(tmp_path / "texts.jsonl")
    return AdapterRun(str(model_folder("llama")), str(data), AdapterRecipe(**SAME), tmp_path / "out", "float32")


@contextlib.contextmanager
def no_room_for(size: int) -> Iterator[None]:
    """Files cannot grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    """Of what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_one_training_at_a_time(run: AdapterRun, tmp_path: Path) -> None:
    with alone(run.out):
        for act in (run.train, run.finish):
            with pytest.raises(ValueError, match="another training is at work on it: choose another folder"):
                act()
    assert names(tmp_path) == ["texts.jsonl"]
    run.train()
    run.finish()
    with pytest.raises(ValueError, match="is there already"):  # one that began before this one ended
        run.train()
    assert names(tmp_path) == ["out", "texts.jsonl"]


def test_a_name_that_leaves_no_room_beside_it(run: AdapterRun, tmp_path: Path) -> None:
    run.out = tmp_path / ("o" * 250)
    with pytest.raises(ValueError, match="ooo' cannot be written: File name too long; choose another folder"):
        run.train()


def test_another_kind_of_training_is_not_gone_on_with(run: AdapterRun) -> None:
    run.train()
    probe = ProbeRun(run.info.name, run.data, ProbeRecipe(**SAME), run.out, "float32")
    with pytest.raises(ValueError, match="unfinished training with recipe='AdapterRecipe', not 'ProbeRecipe'"):
        probe.train()


def test_an_unfinished_training_without_some_tensors(run: AdapterRun, model_folder: ModelFolder) -> None:
    run.train()
    other = AdapterRun(str(model_folder("llama")), run.data, run.training.recipe, run.out, "float32")
    other.training.network.more = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no unfinished training .*delete it to begin again"):
        other.train()


def test_no_room_to_keep_a_training(run: AdapterRun, tmp_path: Path) -> None:
    run.unfinished.mkdir()
    run.checkpoint.save(1)
    kept = run.checkpoint.path.read_bytes()
    with no_room_for(len(kept) // 2), pytest.raises(ValueError, match="cannot be kept there .*make room"):
        run.checkpoint.save(2)
    assert run.checkpoint.path.read_bytes() == kept
    assert names(run.unfinished) == ["steps.safetensors"]


@pytest.mark.parametrize("kind", ["adapter", "LayerSkip"])
def test_no_room_for_the_folder(model_folder: ModelFolder, tmp_path: Path, kind: str) -> None:
    """The training is kept, and the same command writes the folder once there is room."""
    data = write_texts(tmp_path / "texts.jsonl")
    training = TRAININGS[kind](model_folder("llama"), data, tmp_path / "out")
    training.train()
    with no_room_for(4000), pytest.raises(ValueError, match="give a file that can be written"):
        training.finish()
    assert names(tmp_path) == ["out.unfinished", "texts.jsonl"]
    training.finish()
    assert names(tmp_path) == ["out", "texts.jsonl"]


@pytest.mark.parametrize("part_run", [(AdapterRun, AdapterRecipe), (ProbeRun, ProbeRecipe), (ExitHeadRun, HeadRecipe)])
def test_the_model_reads_a_row_once_where_there_is_room(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_run: tuple
) -> None:
    """Rows beyond that are read at each step, and the part is the same to the bit."""
    trained, recipe = part_run
    data, read, learnt = write_texts(tmp_path / "texts.jsonl", 40), list[Text](), list[list[Tensor]]()
    reading = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, text: (read.append(text), reading(self, text))[1])
    chosen = recipe(**SAME | {"epochs": 2, "max_steps": None, "batch_size": 16})
    for number, rows_kept in enumerate((1000, 5)):
        run = trained(str(model_folder("llama")), str(data), chosen, tmp_path / f"out-{number}", "float32")
        layers = 1 + run.training.full_depth
        monkeypatch.setattr(run, "_disk_gb", 1e-9 * rows_kept * 24 * (layers * 32 * 4 + 4))
        run.train()
        rows = len(run.rows)
        scale = 16 - min(rows_kept, 16) if trained is ProbeRun else 0  # its first batch once more
        assert len(read) == (rows if rows_kept > rows else 5 + 2 * (rows - 5) + scale)
        assert {text.source for text in read} == set(range(rows))
        learnt.append([parameter.detach() for parameter in run.training.network.parameters()])
        read.clear()
    assert all(torch.equal(*pair) for pair in zip(*learnt, strict=True))


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_stopped_training_goes_on_as_if_it_had_not(model_folder: ModelFolder, tmp_path: Path, kind: str) -> None:
    data, model = write_texts(tmp_path / "texts.jsonl"), model_folder("llama", tied="Skip" in kind)

    def begin(name: str) -> TrainingRun:
        return TRAININGS[kind](model, data, tmp_path / name)

    def stop(step: int, loss: float) -> None:
        if step == 1:
            raise KeyboardInterrupt

    whole, stopped, steps = begin("whole"), begin("stopped"), list[int]()
    whole.train()
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training.take_steps, "__defaults__", (0.0,))  # save after every step
        stopped.train(stop)
    resumed = begin("stopped")
    resumed.train(lambda step, loss: steps.append(step))
    for run in (whole, resumed):
        run.finish()
    assert steps == [2, 3]
    assert names(tmp_path) == ["stopped", "texts.jsonl", "whole"]
    (expected,), (found,) = ((tmp_path / name).glob("*.safetensors") for name in ("whole", "stopped"))
    assert found.read_bytes() == expected.read_bytes()
