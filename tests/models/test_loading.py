"""What cannot be run is refused with one line that names it; what can be run is loaded exactly."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from families.specimens import SPECIAL, SUPPORTED, Specimen
from grids import nightly
from models_for_tests import VOCAB_SIZE, build_tokenizer, greedy_with_transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch.memory_needs import whole_weight_bytes
from ppd_runtime.models.checkpoint import architecture
from ppd_runtime.models.checkpoint.architecture import check_architecture
from ppd_runtime.models.checkpoint.config import model_config, weight_files
from ppd_runtime.models.checkpoint.description import ModelInfo, describe, load_tokenizer
from ppd_runtime.models.checkpoint.dtype import choose_device, choose_dtype
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.checkpoint.quantised import packed_file
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.compiled.code_metadata import weights_of
from ppd_runtime.models.compiled.export import layer_for

ModelFolder = Callable[..., Path]
Damage = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NUM_LAYERS = 3
OF_SEVERAL_KINDS = [
    specimen
    for specimen in (*map(Specimen, SUPPORTED), *SPECIAL)
    if len(set(getattr(specimen.config(), "layer_types", None) or ())) > 1
]


def load_everything(model: str) -> ModelInfo:
    info = describe(model)
    load_tokenizer(info)
    load_layers(info, info.num_layers, torch.float32, "cpu")
    return info


def check_one_line(error: pytest.ExceptionInfo[ValueError], model: str) -> None:
    assert type(error.value) is ValueError
    text = str(error.value)
    assert text.startswith(f"model {model!r}"), "the message names the model"
    assert "\n" not in text
    assert len(text) < 500 + len(model)


@pytest.fixture
def copy(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A model folder that a test may damage."""
    return shutil.copytree(model_folder("llama", num_layers=NUM_LAYERS), tmp_path / "model")


def write(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(pattern: str) -> Damage:
    return lambda folder: [path.unlink() for path in list(folder.glob(pattern))]


def truncate(size: int) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


def configure(**changes: object) -> Damage:
    return lambda folder: write("config.json", json.dumps(json.loads((folder / "config.json").read_text()) | changes))(
        folder
    )


def without(*names: str) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file({name: t for name, t in tensors.items() if name not in names}, folder / WEIGHTS, {"format": "pt"})

    return damage


def with_tensor(name: str, tensor: torch.Tensor) -> Damage:
    return lambda folder: save_file(load_file(folder / WEIGHTS) | {name: tensor}, folder / WEIGHTS, {"format": "pt"})


def with_index(content: str) -> Damage:
    """An index and no single file."""
    return lambda folder: (write(INDEX, content)(folder), (folder / WEIGHTS).unlink())


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no config": (remove("config.json"), "no usable config.json"),
    "config is no JSON": (write("config.json", "{"), "no usable config.json"),
    "config is a list": (write("config.json", "[]"), "no usable config.json"),
    "unknown model type": (configure(model_type="nosuch"), "nosuch"),
    "size is a text": (configure(hidden_size="wide"), "hidden_size"),
    "heads do not divide the width": (configure(num_attention_heads=3), "attention heads"),
    "unknown activation": (configure(hidden_act="nosuch"), "nosuch"),
    "unknown rope": (configure(rope_parameters={"rope_type": "nosuch", "rope_theta": 1e4}), "nosuch"),
    "layer kinds do not fit": (configure(layer_types=["full_attention"]), "layer_types"),
    "quantised": (configure(quantization_config={"quant_method": "gptq", "bits": 4}), "quant"),
    "no weights": (remove(WEIGHTS), "no safetensors weights"),
    "weights of no bytes": (truncate(0), WEIGHTS),
    "weights cut in the tensors": (truncate(20_000), WEIGHTS),
    "weights are garbage": (write(WEIGHTS, b"\xff" * 5000), WEIGHTS),
    "no embedding": (without("model.embed_tokens.weight"), "lack model.embed_tokens.weight (1 tensor"),
    "no head": (without("lm_head.weight"), "lack lm_head.weight"),
    "a layer lacks two tensors": (
        without("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        "lack model.layers.1.mlp.down_proj.weight (2 tensors",
    ),
    "fewer layers than the config says": (
        configure(num_hidden_layers=10**4),
        f"10000 layers, its files {NUM_LAYERS};",
    ),
    "a weight of whole numbers": (
        with_tensor("model.norm.weight", torch.ones(32, dtype=torch.int16)),
        "stores model.norm.weight as I16",
    ),
    "an end token as a text": (write("generation_config.json", '{"eos_token_id": "<eos>"}'), "eos_token_id='<eos>'"),
    "one end token is a text": (configure(eos_token_id=[0, "<eos>"]), "eos_token_id"),
    "a tensor of the wrong shape": (with_tensor("model.norm.weight", torch.ones(5)), "model.norm.weight"),
    "another vocabulary than the config's": (configure(vocab_size=VOCAB_SIZE + 1), "weight"),
    "index is no JSON": (with_index("{"), INDEX),
    "index names a missing file": (
        with_index(f'{{"weight_map": {{"a": "gone.safetensors", "b": "{WEIGHTS}"}}}}'),
        "lacks gone.safetensors (2 of 2 files of weights)",
    ),
    "named weights are missing": (configure(transformers_weights="other.safetensors"), "lacks other.safetensors (1"),
    "named weights elsewhere": (
        configure(transformers_weights="../other.safetensors"),
        "transformers_weights '../other.safetensors', which is no file in it",
    ),
    "index names a file elsewhere": (with_index('{"weight_map": {"a": "../b"}}'), "'../b', which is no file in it"),
    "index names no file": (with_index('{"weight_map": {"a": 5, "b": "c"}}'), "names '', which is no file in it"),
    "more layers than any model": (configure(num_hidden_layers=10**9), "has 1000000000 layers, at most 10000 run"),
    "more layers within a part": (configure(text_config={"num_hidden_layers": 10**9}), "has 1000000000 layers"),
    "code of its own for no type": (configure(auto_map={"AutoConfig": "a.B"}, model_type=[]), "code of its own"),
    "generation config is no JSON": (write("generation_config.json", "{"), "generation_config.json"),
    "no tokenizer": (remove("tokenizer*"), "no usable tokenizer"),
    "no tokenizer.json": (remove("tokenizer.json"), "no usable tokenizer"),
    "tokenizer is no tokenizer": (write("tokenizer.json", '{"version": "1.0"}'), "no usable tokenizer"),
    "tokenizer of an unknown kind": (
        write("tokenizer.json", '{"version": "1.0", "added_tokens": [], "model": {"type": "Nosuch"}}'),
        "no usable tokenizer",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_folders_are_refused(copy: Path, what: str) -> None:
    damage, reason = DAMAGES[what]
    damage(copy)
    with pytest.raises(ValueError) as error:
        load_everything(str(copy))
    check_one_line(error, str(copy))
    assert reason in str(error.value)


@pytest.mark.parametrize("model", ["no-such-model", "nobody/nothing", "no such model!", " ", "a--b", "x" * 300])
def test_unknown_names_are_refused_without_a_network(model: str) -> None:
    with pytest.raises(ValueError) as error:
        describe(model)
    check_one_line(error, model)
    assert "check the name or give a local folder" in str(error.value)


@pytest.mark.parametrize("model", ["/no/such/folder", "./no-such-folder", "../x", "~/models/x", "a/b/c"])
def test_paths_that_do_not_exist_are_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        describe(model)
    check_one_line(error, model)
    assert "no such folder" in str(error.value)


def test_a_file_is_no_model(copy: Path) -> None:
    with pytest.raises(ValueError) as error:
        describe(str(copy / "config.json"))
    check_one_line(error, str(copy / "config.json"))


def test_no_name_is_no_model(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the working folder happens to hold one."""
    monkeypatch.chdir(copy)
    with pytest.raises(ValueError) as error:
        describe("")
    check_one_line(error, "")


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "(t5): an encoder-decoder"),
        (transformers.WhisperConfig(), "(whisper): an encoder-decoder"),
        (transformers.GPT2Config(n_embd=32, n_head=4), "(gpt2): a decoder with `model.layers`"),
        (transformers.BertConfig(**SMALL), "(bert): a decoder with `model.layers`"),
        (transformers.OPTConfig(**SMALL), "(opt): a decoder with `model.layers`"),
        (transformers.JambaConfig(**SMALL), "(jamba): its layers cannot run one by one"),
        (transformers.CLIPConfig(), "(clip): a model around a text model (clip_text_model)"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_architectures_that_cannot_be_cut_are_refused(tmp_path: Path, config: PretrainedConfig, reason: str) -> None:
    config.save_pretrained(tmp_path)
    save_file({}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError) as error:
        describe(str(tmp_path))
    check_one_line(error, str(tmp_path))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "specimen",
    [pytest.param(one, marks=nightly if number % 3 else ()) for number, one in enumerate(OF_SEVERAL_KINDS)],
    ids=lambda specimen: specimen.name,
)
def test_a_layer_has_the_same_tensors_in_every_stage(specimen: Specimen, tmp_path: Path) -> None:
    """Code that was compiled for it takes them all, those of a rotary table for another kind of layer too."""
    specimen.build().save_pretrained(tmp_path)
    info = describe(str(tmp_path))
    models = [load_layers(info, last, torch.float32, "cpu") for last in range(info.num_layers, 0, -1)]
    for model in models[1:]:
        for layer in range(len(model.model.layers)):
            expected, got = (weights_of(layer_for(of, layer, passes=1)) for of in (models[0], model))
            assert list(got) == list(expected)
            assert all(tensor.equal(expected[name]) for name, tensor in got.items())


def test_describing_reads_the_config(model_folder: ModelFolder) -> None:
    folder = model_folder("llama", num_layers=NUM_LAYERS, eos_token_id=7)
    assert describe(str(folder)) == ModelInfo(str(folder), folder, NUM_LAYERS, VOCAB_SIZE, 512, frozenset([7]))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ('{"eos_token_id": 3}', {3}),
        ('{"eos_token_id": [3, 4]}', {3, 4}),
        ('{"eos_token_id": null}', set()),
        ("{}", {9}),
        (None, {9}),
    ],
)
def test_end_tokens_are_those_that_generate_uses(copy: Path, generation: str | None, expected: set[int]) -> None:
    configure(eos_token_id=9)(copy)
    if generation is None:
        remove("generation_config.json")(copy)
    else:
        write("generation_config.json", generation)(copy)
    assert describe(str(copy)).eos_token_ids == expected


@pytest.mark.parametrize("name", ["something.else", "model.layers.x.weight", "model.layers.7.mlp.up_proj.weight"])
def test_tensors_that_nobody_needs_do_no_harm(copy: Path, name: str) -> None:
    with_tensor(name, torch.ones(3))(copy)
    load_everything(str(copy))


def test_experts_that_give_their_input_back_need_no_tensors(tmp_path: Path) -> None:
    """The library saves some for them, and reads none."""
    Specimen("longcat_flash").build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    expected = OrdinaryDecoding(tmp_path, dtype="float32").generate([5, 9, 200], max_new_tokens=20).token_ids
    without(*(name for name in load_file(tmp_path / WEIGHTS) if re.search(r"\.experts\.[45]\.", name)))(tmp_path)
    assert OrdinaryDecoding(tmp_path, dtype="float32").generate([5, 9, 200], max_new_tokens=20).token_ids == expected


def test_layers_that_the_config_leaves_out_are_told(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(num_hidden_layers=NUM_LAYERS - 1)(copy)
    assert load_everything(str(copy)).num_layers == NUM_LAYERS - 1
    assert f"config.json has {NUM_LAYERS - 1} layers, its files {NUM_LAYERS}: those behind are not read" in caplog.text


def test_tensors_of_other_layers_are_not_needed(copy: Path) -> None:
    """A sub-process' host can have a folder that lacks what it does not load."""
    info, tensors = describe(str(copy)), load_file(copy / WEIGHTS)
    without(*(name for name in tensors if name.startswith("model.layers.2.")))(copy)
    model = load_layers(info, 2, torch.float32, "cpu")
    assert model.config.num_hidden_layers == len(model.model.layers) == 2
    assert all(torch.equal(p, tensors[name]) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="lack model.layers.2"):
        load_layers(info, 3, torch.float32, "cpu")


@pytest.fixture
def saved_again(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A model in one file, with the index of another one that was saved there before, in shards, and these."""
    folder = shutil.copytree(
        model_folder("llama", num_layers=NUM_LAYERS, seed=1, max_shard_size="40KB"), tmp_path / "m"
    )
    shutil.copytree(model_folder("llama", num_layers=NUM_LAYERS), folder, dirs_exist_ok=True)
    assert (folder / INDEX).exists()
    return folder


@pytest.mark.parametrize("old_shards", ["there", "gone", "no JSON"])
def test_the_single_file_comes_first(model_folder: ModelFolder, saved_again: Path, tmp_path: Path, old_shards) -> None:
    """Loaded, packed, quantised for good, fingerprinted, copied and counted."""
    new = describe(str(model_folder("llama", num_layers=NUM_LAYERS)))
    if old_shards == "gone":
        remove("model-*.safetensors")(saved_again)
    elif old_shards == "no JSON":
        write(INDEX, "{")(saved_again)
    info = describe(str(saved_again))
    assert weight_files(saved_again) == [saved_again / WEIGHTS]
    sizes = [whole_weight_bytes(one, model_config(one.folder), torch.float32) for one in (info, new)]
    assert sizes[0] == sizes[1]
    assert model_fingerprint(info) == model_fingerprint(new)
    assert (
        packed_file(replace(info, weights="int8")).read_bytes()
        == packed_file(replace(new, weights="int8")).read_bytes()
    )
    quantise_model(str(saved_again), tmp_path / "out", "int8")
    assert not list((tmp_path / "out").glob("model*"))
    expected, _ = greedy_with_transformers(saved_again, [5, 6, 7], 8)
    for folder, weights in ((saved_again, None), (tmp_path / "out", "int8")):
        with PPDRuntime(folder, stages=2, transport="local", weights=weights, dtype="float32") as runtime:
            same = OrdinaryDecoding(new.folder, weights=weights, dtype="float32").generate([5, 6, 7], max_new_tokens=8)
            assert runtime.generate([5, 6, 7], max_new_tokens=8).token_ids == same.token_ids
            assert weights or same.token_ids == tuple(expected)


def test_devices_and_dtypes(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    info = describe(str(model_folder("llama", dtype="bfloat16")))
    assert choose_device("cpu") == "cpu"
    assert choose_dtype("auto", "cuda", info) == torch.bfloat16
    assert choose_dtype("float16", "cpu", info) == torch.float16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    with pytest.raises(ValueError, match="device='cuda:1': PyTorch sees no GPU here"):
        choose_device("cuda:1")


def test_an_architecture_is_checked_once_for_each_configuration(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def check(model: str, config: PretrainedConfig) -> transformers.PreTrainedModel:
        checked.append(config.num_hidden_layers)
        return check_architecture(model, config)

    monkeypatch.setattr(architecture, "_known", {})
    monkeypatch.setattr(architecture, "check_architecture", check)
    assert describe(str(copy)) == describe(str(copy))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS - 1}))
    assert describe(str(copy)).num_layers == NUM_LAYERS - 1
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    for _ in range(2):  # what is refused is not remembered
        with pytest.raises(ValueError, match=r"^model "):
            describe(str(copy))
    assert checked[:2] == [NUM_LAYERS, NUM_LAYERS - 1]
