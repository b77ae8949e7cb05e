"""Models' folders with a `generation_config.json` of one's own, and what transformers makes of them."""

import functools
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

DEMO = Path(__file__).parents[1] / "ppd_runtime/models/demo"


def with_generation(folder: Path, of: Path, fields: object) -> Path:
    """The model of a folder with another `generation_config.json`; None: without one."""
    folder.mkdir()
    for file in of.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    if fields is not None:
        (folder / "generation_config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return folder


@functools.lru_cache(1)
def _model_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generated(folder: Path, prompt_ids: list[int], new: int) -> tuple[int, ...]:
    """By transformers' `generate`, greedily, as the folder says."""
    if (folder / "generation_config.json").exists():  # all else is another folder's
        model = _model_of((folder / "config.json").resolve().parent)
        model.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = torch.tensor([prompt_ids])
    with torch.inference_mode():
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=new)
    return tuple(output[0, len(prompt_ids) :].tolist())
