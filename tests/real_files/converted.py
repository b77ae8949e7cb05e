"""A GGUF file of a Llama folder, by the steps of llama.cpp's `convert_hf_to_gguf.py`, with the package it uses."""

from collections.abc import Sequence
from pathlib import Path

import gguf
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

_FILE_TYPES = {"F32": gguf.LlamaFileType.ALL_F32, "F16": gguf.LlamaFileType.MOSTLY_F16}


def convert(
    folder: Path,
    file: Path,
    kind: str = "F32",
    equal_tokens: tuple[int, int] | None = None,
    merges: Sequence[str] | None = None,
) -> Path:
    """Write the file.

    Args:
        folder: one of `save_pretrained`.
        file: the new file.
        kind: F32 or F16, of the matrices.
        equal_tokens: the second of them gets the first one's text.
        merges: others than the tokenizer's.
    """
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(folder.name)
    writer.add_size_label("1M")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    _add_vocabulary(writer, folder, equal_tokens, merges)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in load_file(folder / "model.safetensors").items():
        part = name.split(".")[-2]
        turned = _permuted(tensor, heads[part]) if part in heads else tensor
        numbers = turned.half() if kind == "F16" and tensor.dim() > 1 else turned.float()
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), numbers.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_vocabulary(
    writer: gguf.GGUFWriter, folder: Path, equal_tokens: tuple[int, int] | None, merges: Sequence[str] | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if equal_tokens:
        tokens[equal_tokens[1]] = tokens[equal_tokens[0]]
    added = tokenizer.added_tokens_decoder
    kinds = [gguf.TokenType.CONTROL if number in added else gguf.TokenType.NORMAL for number in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(tokens))
    special.merges = list(merges) if merges else special.merges
    special.add_to_gguf(writer, quiet=True)


def _permuted(weight: Tensor, heads: int) -> Tensor:
    """As the converter permutes a Llama's queries and keys."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
