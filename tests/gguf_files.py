"""GGUF files for tests: any metadata and tensors, and those of a small model in a folder."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf_converter import converted
from torch import Tensor

from ppd_runtime.models.native.quantising import quantise

TYPES = {name: kind.value for name, kind in gguf.GGMLQuantizationType.__members__.items()}
SCALES = {
    "Q4_0": (0, None, 8),
    "Q4_1": (0, 2, 8),
    "Q5_0": (0, None, 16),
    "Q5_1": (0, 2, 16),
    "Q8_0": (0, None, 128),
    "Q2_K": (80, 82, 2 * 8),
    "Q3_K": (108, None, 4 * 16),
    "Q4_K": (0, 2, 8 * 32),
    "Q5_K": (0, 2, 16 * 32),
    "Q6_K": (208, None, 32 * 64),
    "IQ4_NL": (0, None, 100),
    "IQ4_XS": (0, None, 100 * 16),
    "MXFP4": (0, None, 12),
}
"""Of the quantised types: where a block has its scale and its minimum, and how many scales its larger numbers are."""
CODES = {"Q4_1": 16, "Q5_1": 32, "Q2_K": 4, "Q4_K": 16, "Q5_K": 32}
"""Of types with minimums."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ALIGNMENT = 32
Stored = tuple[str, tuple[int, ...], bytes]
"""Type, shape with rows first, and bytes of a tensor."""


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Stored], version: int = 3) -> Path:
    """Write a file; a value is a text, a truth value, a whole number, a number, or a list of one of these."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], TYPES[kind], len(data))
        data += content + bytes(-len(content) % ALIGNMENT)
    path.write_bytes(header + bytes(-len(header) % ALIGNMENT) + data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    if isinstance(value, list):
        kind, _ = _scalar(value[0])
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_scalar(each)[1] for each in value)
    kind, content = _scalar(value)
    if kind == 5 and value >= 0:
        kind = 4  # counts and sizes have no sign
    return struct.pack("<I", kind) + content


def _scalar(value: object) -> tuple[int, bytes]:
    if isinstance(value, str):
        return 8, _text(value)
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return 5, struct.pack("<i", value)
    return 6, struct.pack("<f", value)


def stored(tensor: Tensor, kind: str) -> Stored:
    """A tensor in a type; vectors are always in float32."""
    kind = "F32" if tensor.dim() == 1 else kind
    if kind in ("Q8_0", "Q4_0"):
        found = quantise(tensor.reshape(-1, tensor.shape[-1]), {"Q8_0": "int8", "Q4_0": "int4"}[kind])
        numbers, scales = torch.from_numpy(found.whole), torch.from_numpy(found.scales)
        if kind == "Q4_0":
            low, high = (numbers + 8).view(torch.uint8).chunk(2, dim=-1)
            numbers = low | high << 4
        content = torch.cat([scales[..., None].view(torch.uint8), numbers.view(torch.uint8)], dim=-1)
    else:
        content = tensor.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
    return kind, tuple(tensor.shape), content.contiguous().view(torch.uint8).numpy().tobytes()


def model_parts(
    folder: Path, kind: str, others: Mapping[str, str] | None = None
) -> tuple[dict[str, object], dict[str, Stored]]:
    """Metadata and tensors of a model folder in a type; `others` are the types of some, by their names in the file."""
    metadata, found = converted(folder)
    tensors = {
        name: stored(tensor, (others or {}).get(name, _own_type(name) or kind)) for name, tensor in found.items()
    }
    general = {"general.alignment": ALIGNMENT, "general.file_type": 1}
    return metadata | general | tokenizer_parts(folder), tensors


def _own_type(name: str) -> str | None:
    """That in which the converter writes a tensor, whatever the file's is."""
    floats = ("_norm.", "ffn_gate_inp", "shortconv.conv")
    return "F32" if any(part in name for part in floats) or not name.endswith(".weight") else None


def tokenizer_parts(folder: Path) -> dict[str, object]:
    """Metadata of a folder's byte-level tokenizer, whose special tokens are the added ones."""
    described = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in described["added_tokens"]}
    vocabulary = sorted(described["model"]["vocab"].items(), key=lambda pair: pair[1])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [text for text, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if number in special else 1 for _, number in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in described["model"]["merges"]],
    }


def write_model(
    path: Path, folder: Path, kind: str, others: Mapping[str, str] | None = None, **changed: object
) -> Path:
    """Write a model folder as a GGUF file in a type; `changed` metadata has __ for dots, None takes a key away."""
    metadata, tensors = model_parts(folder, kind, others)
    metadata |= {key.replace("__", "."): value for key, value in changed.items()}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def write_parts(folder: Path, metadata: Mapping[str, object], tensors: Mapping[str, Stored], count: int) -> list[Path]:
    """Write a model as so many files, as `llama-gguf-split` does: the first one alone has the model's metadata."""
    names, paths = list(tensors), []
    for number in range(count):
        some = names[number * len(names) // count : (number + 1) * len(names) // count]
        split = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        path = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        own = {**metadata, **split} if number == 0 else split
        paths.append(write_gguf(path, own, {name: tensors[name] for name in some}))
    return paths


def drawn_blocks(kind: str, shape: tuple[int, int], seed: int) -> Stored:
    """A matrix of any codes, whose scales and minimums give it numbers that a model's have."""
    place, of_minimum, largest = SCALES[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    drawing = np.random.default_rng(seed)
    blocks = drawing.integers(0, 256, (shape[0] * shape[1] // numbers, size), dtype=np.uint8)
    scales = drawing.uniform(0.02, 0.06, len(blocks)) * drawing.choice([-1, 1], len(blocks)) / largest
    if kind == "MXFP4":
        blocks[:, place] = drawing.integers(119, 122, len(blocks))
    else:
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if of_minimum is not None:
        minimums = scales * (-0.5 if kind in ("Q4_1", "Q5_1") else 0.5) * CODES[kind]
        blocks[:, of_minimum : of_minimum + 2] = minimums.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return kind, shape, blocks.tobytes()
