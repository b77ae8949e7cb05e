"""Models that also read pictures: their text model is opened by itself, in every format, by all names of tensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from families.specimens import Specimen, Wrapper
from models_for_tests import build_tokenizer
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.models.checkpoint.description import describe, load_tokenizer
from ppd_runtime.models.checkpoint.wrappers import text_names, text_tensor

PROMPT = [3, 17, 5, 60, 33]
SETTINGS = {"max_new_tokens": 12, "ignore_eos": True}


def saved(family: str, folder: Path) -> Path:
    Wrapper(family).build().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def tokens(folder: Path, **settings: str) -> list[int]:
    return list(OrdinaryDecoding(str(folder), **settings).generate(PROMPT, **SETTINGS).token_ids)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.norm1.weight", None),
        ("visual.blocks.0.norm1.weight", None),
        ("vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", None),
        ("model.vision_tower.layers.3.mlp.fc1.weight", None),
        ("multi_modal_projector.norm.weight", None),
    ],
)
def test_names_of_the_text_model(name: str, expected: str | None) -> None:
    assert text_names("llava")(name) == expected
    assert text_names("llama")(name) == name


def test_experts_are_turned_where_files_have_inputs_first() -> None:
    name, own = "model.layers.0.mlp.experts.gate_up_proj", torch.rand(4, 20, 32)
    for stored in (own, own.transpose(1, 2)):
        assert torch.equal(text_tensor("qwen3_vl_moe", name, stored, 32), own)
    assert text_tensor("qwen3_moe", name, own.transpose(1, 2), 32).shape == (4, 32, 20)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "qwen3_5"])
def test_other_names_and_formats_give_the_same_text(family: str, tmp_path: Path) -> None:
    """Of floats, and of int8 weights in turn; pictures' weights may be damaged, for nothing reads them."""
    first, second = saved(family, tmp_path / "first"), tmp_path / "second"
    shutil.copytree(first, second)
    tensors = load_file(first / "model.safetensors")
    names = text_names(family)
    others = {"model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name: tensor
              for old, tensor in tensors.items() if (name := names(old))}  # fmt: skip
    pictures = {"model.visual.layers.99.weight": torch.full((2, 2), torch.nan)}
    save_file(others | pictures, second / "model.safetensors", {"format": "pt"})
    assert tokens(first, dtype="float32") == tokens(second, dtype="float32")
    assert tokens(first, weights="int8") == tokens(second, weights="int8")
    assert describe(str(first)).num_layers == 4


def test_a_model_whose_part_for_pictures_needs_another_package(tmp_path: Path) -> None:
    """Gemma 3n's is timm's, which is not asked for."""
    text = Specimen("gemma3n_text").build()
    tensors = {f"model.language_model.{name}": one for name, one in text.model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    CONFIG_MAPPING["gemma3n"](text_config=text.config, tie_word_embeddings=True).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = text.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12)[0, len(PROMPT) :].tolist()
    assert tokens(tmp_path, dtype="float32") == expected


def test_the_processors_chat_template_is_the_tokenizers(tmp_path: Path) -> None:
    folder, template = saved("llava", tmp_path), "{{ messages[0].content }}!"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(describe(str(folder))).chat_template == template
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(ValueError, match="'image_url' is no text, and only text is read: leave it out"):
        OrdinaryDecoding(str(folder), dtype="float32").chat(picture)


@pytest.mark.parametrize("text", [{}, {"text_config": None}, {"text_config": {}}])
def test_one_without_its_text_model_is_refused_in_one_line(text: dict[str, None], tmp_path: Path) -> None:
    """The library would take another model's sizes for it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **text}))
    with pytest.raises(ValueError, match=r"\(gemma3\): config.json has no text_config") as refused:
        describe(str(tmp_path), needs_weights=False)
    assert "\n" not in str(refused.value)


def test_an_older_file_without_that_part_is_read(tmp_path: Path) -> None:
    flat = {"model_type": "qwen2_vl", "num_hidden_layers": 3, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert describe(str(tmp_path), needs_weights=False).num_layers == 3


@pytest.mark.parametrize("family", ["paligemma", "mllama"])
def test_others_are_refused_in_one_line(family: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"\({family}\): a model around a text model \(\w+\)") as refused:
        describe(str(tmp_path))
    assert "\n" not in str(refused.value)
