"""GGUF files as models: the numbers and texts of the folders they were made of; what is wrong with one is one line."""

import itertools
import json
import random
import resource
import shutil
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import commands
import gguf
import numpy as np
import pytest
import torch
from gguf_files import Stored, drawn_blocks, model_parts, stored, tokenizer_parts, write_gguf, write_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from two_texts import texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime, open_method
from ppd_runtime.models.checkpoint import kept_folders
from ppd_runtime.models.checkpoint.config import QUANTISED, model_config
from ppd_runtime.models.checkpoint.description import ModelInfo, describe, load_tokenizer
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.gguf import kept
from ppd_runtime.models.checkpoint.gguf.blocks import QUANTISED_TYPES
from ppd_runtime.models.checkpoint.gguf.reader import read_gguf
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.checkpoint.quantised import check_packed
from ppd_runtime.models.native.formats import NUMBER_FORMATS
from ppd_runtime.models.native.packing import as_floats, packed_as

pytestmark = pytest.mark.usefixtures("own_gguf_cache")
ModelFolder = Callable[..., Path]
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
FLIPS = 50
"""Files of the test that damages bytes at random."""


def state_of(info: ModelInfo) -> dict[str, torch.Tensor]:
    return load_layers(info, info.num_layers, torch.float32, "cpu").state_dict()


@pytest.mark.parametrize(
    ("family", "settings", "kind"),
    [
        ("llama", {}, "F32"),
        ("llama", {"tied": True, "attention_bias": True, "mlp_bias": True}, "F16"),
        ("llama", {"rope_parameters": LLAMA3}, "F32"),
        ("qwen2", {}, "BF16"),
    ],
)
def test_floats_give_the_text_of_the_folder(model_folder, tmp_path, family, settings, kind):
    folder = model_folder(family, dtype=DTYPES[kind], **settings)
    file = tmp_path / "model.gguf"
    metadata, tensors = model_parts(folder, kind)
    if settings.get("rope_parameters"):
        tensors["rope_freqs.weight"] = stored(llama3_factors(8), "F32")
    write_gguf(file, metadata, tensors)
    ours, theirs = describe(str(file)), describe(str(folder))
    assert model_config(ours.folder).dtype == getattr(torch, DTYPES[kind])
    assert (ours.num_layers, ours.vocab_size, ours.max_positions) == (
        theirs.num_layers,
        theirs.vocab_size,
        theirs.max_positions,
    )
    found, expected = state_of(ours), state_of(theirs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    of_folder = texts(OrdinaryDecoding(folder, dtype=DTYPES[kind]))
    assert texts(OrdinaryDecoding(file, dtype=DTYPES[kind])) == of_folder


def llama3_factors(head_dim: int) -> torch.Tensor:
    """As llama.cpp's converter has them."""
    waves = 2 * torch.pi * 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    smooth = ((8192 / waves - 1) / (4 - 1)).clamp(0, 1)
    return 1 / ((1 - smooth) / 8 + smooth)


@pytest.mark.parametrize(
    ("scaling", "keys"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            YARN,
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 16.0},
            {"type": "yarn", "factor": 2.0, "original_context_length": 256, "yarn_beta_fast": 16.0},
        ),
    ],
)
def test_scaled_rotary_positions_are_the_folders(model_folder, tmp_path, scaling, keys):
    folder = model_folder("qwen2", rope_parameters={"rope_theta": 10000.0, **scaling})
    named = {f"qwen2__rope__scaling__{key}": value for key, value in keys.items()}
    file = write_model(tmp_path / "model.gguf", folder, "F32", **named)
    assert texts(OrdinaryDecoding(file)) == texts(OrdinaryDecoding(folder))


@pytest.mark.parametrize(
    ("family", "settings", "kind", "others"),
    [
        ("llama", {}, "Q8_0", {}),
        ("llama", {"tied": True}, "Q4_0", {}),
        ("llama", {}, "Q4_0", {"output.weight": "F16", "token_embd.weight": "BF16"}),
        ("llama", {"tied": True}, "Q8_0", {"token_embd.weight": "F16"}),
        ("qwen2", {}, "Q4_0", {"output.weight": "Q8_0", "blk.1.ffn_up.weight": "F16"}),
        ("qwen3", {}, "Q4_0", {"blk.0.attn_k.weight": "Q8_0"}),
    ],
    ids=["llama", "tied llama", "head in F16", "tied head in F16", "head in Q8_0", "qwen3"],
)
def test_packed_weights_have_the_files_numbers(model_folder, tmp_path, family, settings, kind, others):
    folder = model_folder(family, **settings)
    metadata, tensors = model_parts(folder, kind, others)
    file = write_gguf(tmp_path / "model.gguf", metadata, tensors, version=2 if family == "qwen3" else 3)
    check_numbers(file, tensors, family)


def check_numbers(file: Path, tensors: Mapping[str, Stored], family: str) -> None:
    """The model's matrices hold the numbers of the file, packed where they are packed there."""
    info = describe(str(file))
    assert (info.weights, info.weights_name) == ("gguf", "gguf")
    state, config = state_of(info), model_config(info.folder)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in tensors.items():
        ours = state[library_name(name)]
        expected = numbers(tensor)
        if family == "llama" and (part := name.split(".")[-2]) in heads:
            expected = expected.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).reshape(expected.shape)
        assert (ours.dtype == torch.uint8) == (tensor[0] not in DTYPES), name
        if ours.dtype == torch.uint8:
            assert packed_as(ours) == (NUMBER_FORMATS[tensor[0]], *expected.shape)
            ours = as_floats(ours)
        assert torch.equal(ours, expected), name
    if "output.weight" not in tensors:
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def check_texts(file: Path) -> None:
    """Layouts and a method give ordinary decoding's text."""
    expected = texts(OrdinaryDecoding(file))
    for layout in ({"k": 1}, {"stages": 2, "guess_vocab": 64}):
        with PPDRuntime(file, transport="local", **layout) as runtime:
            assert texts(runtime) == expected, layout
    assert texts(open_method(file, "layerskip")) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_types_are_mixed_in_one_file(model_folder, tmp_path, tied) -> None:
    """Each type in some matrix; the embedding in another one than layers."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    metadata, tensors = model_parts(model_folder("llama", tied=tied, **sizes), "F32")
    kinds = itertools.cycle([kind for kind in QUANTISED_TYPES if kind != "Q6_K"])
    for number, (name, (_, shape, _)) in enumerate(tensors.items()):
        if len(shape) == 2:
            kind = "Q6_K" if name in ("token_embd.weight", "output.weight") else next(kinds)
            tensors[name] = drawn_blocks(kind, shape, number)
    file = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    check_numbers(file, tensors, "llama")
    check_texts(file)


def library_name(name: str) -> str:
    from gguf_files import NAMES

    parts = {theirs: ours for ours, theirs in NAMES.items()}
    if not name.startswith("blk."):
        stem, _, kind = name.rpartition(".")
        return f"{parts[stem]}.{kind}"
    _, layer, stem, kind = name.split(".")
    return f"model.layers.{layer}.{parts[stem]}.{kind}"


def numbers(tensor: Stored) -> torch.Tensor:
    kind, shape, content = tensor
    if kind not in DTYPES:
        rows = np.frombuffer(content, np.uint8).reshape(shape[0], -1)
        return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    dtype = getattr(torch, DTYPES[kind])
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape).float()


def test_a_file_is_written_once_and_again_when_it_changes(model_folder, tmp_path, monkeypatch) -> None:
    file = write_model(tmp_path / "model.gguf", model_folder("llama"), "Q8_0")
    first = describe(str(file))
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_write", lambda *_: pytest.fail("written again"))
        assert describe(str(file)).folder == first.folder
    assert model_fingerprint(first) == model_fingerprint(describe(str(file)))
    write_model(file, model_folder("llama", seed=1), "Q8_0")
    second = describe(str(file))
    assert second.folder != first.folder
    assert model_fingerprint(second) != model_fingerprint(first)
    monkeypatch.setattr(kept_folders, "_ORPHANED_S", -1.0)
    write_model(tmp_path / "other.gguf", model_folder("llama", seed=2), "Q4_0")
    describe(str(tmp_path / "other.gguf"))
    assert not first.folder.exists()
    assert second.folder.exists()


def test_two_at_once_write_one_folder(model_folder: ModelFolder, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", model_folder("llama"), "Q8_0")
    with ThreadPoolExecutor(2) as threads:
        folders = set(threads.map(kept.kept_folder, [str(file)] * 2))
    names = {path.name for path in (kept.cache_folder() / "gguf").iterdir() if path.suffix != ".lock"}
    assert {folder.name for folder in folders} == names
    assert len(names) == 1


@pytest.mark.parametrize("name", [QUANTISED, "config.json", "made_of.json"])
@pytest.mark.parametrize("damage", ["a bit", "gone"])
def test_a_damaged_kept_folder_is_made_again(model_folder, tmp_path, caplog, name, damage) -> None:
    file = write_model(tmp_path / "model.gguf", model_folder("llama"), "Q8_0")
    damaged = describe(str(file)).folder / name
    whole = damaged.read_bytes()
    damaged.unlink() if damage == "gone" else damaged.write_bytes(bytes([whole[0] ^ 4]) + whole[1:])
    check_packed(describe(str(file)))
    assert "is damaged, so it is removed and made again" in caplog.text
    assert damaged.read_bytes() == whole


def test_the_commands_take_a_file(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("llama")
    file = write_model(tmp_path / "model.F32.gguf", folder, "F32")
    asked = ("generate", "a fox", "--method", "autoregressive", "--model")
    assert commands.printed(*asked, file) == commands.printed(*asked, folder)
    commands.printed("quantize", file, tmp_path / "out", "--weights", "int8")
    assert texts(OrdinaryDecoding(tmp_path / "out")) == texts(OrdinaryDecoding(folder, weights="int8"))
    packed = write_model(tmp_path / "model.Q8_0.gguf", folder, "Q8_0")
    line = commands.refused("quantize", packed, tmp_path / "again", "--weights", "int8")
    assert "has those of its GGUF file; leave weights out" in line
    assert texts(open_method(packed, "layerskip")) == texts(OrdinaryDecoding(packed))
    with pytest.raises(ValueError, match="weights='int4': model .* has those of its GGUF file"):
        PPDRuntime(packed, weights="int4")


def test_the_ends_of_texts_and_the_template_come_from_the_file(model_folder: ModelFolder, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    ends = {"tokenizer__ggml__eos_token_id": 7, "tokenizer__ggml__eot_token_id": 9}
    file = tmp_path / "model.gguf"
    write_model(file, model_folder("llama"), "F32", tokenizer__chat_template=template, **ends)
    info = describe(str(file))
    assert info.eos_token_ids == {7, 9}
    tokenizer = load_tokenizer(info)
    assert (tokenizer.chat_template, tokenizer.eos_token_id) == (template, 7)
    assert describe(str(write_model(file, model_folder("llama"), "F32"))).eos_token_ids == frozenset()


TEXTS = (
    "a fox",
    "The quick  brown fox's 12345 jumps\n\n over   the lazy dog.  ",
    " Zwölf Boxkämpfer – naïve café, 東京, 🦊 <|end|> x_y == 100%",
    "",
)


def reference(pre: str, tokenizer: Tokenizer) -> Tokenizer:
    """The model's own tokenizer, as Hugging Face's files have it, with another one's tokens and merges."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    cased = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(digits: str):
        return pre_tokenizers.Split(Regex(cased.replace("DIGITS", digits)), "isolated")

    whole = Tokenizer.from_str(tokenizer.to_str())
    if pre == "llama-bpe":
        whole.pre_tokenizer = pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), to_bytes])
        whole.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    elif pre == "qwen2":
        whole.normalizer = normalizers.NFC()
        whole.pre_tokenizer = pre_tokenizers.Sequence([split(r"\p{N}"), to_bytes])
    elif pre == "smollm":
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        whole.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return whole


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_bytes_become_the_tokens_of_the_models_own_tokenizer(model_folder, tokenizer, tmp_path, pre) -> None:
    changed = {"tokenizer__ggml__pre": pre, "tokenizer__ggml__bos_token_id": 0}
    file = write_model(tmp_path / "model.gguf", model_folder("llama"), "F32", **changed)
    ours, theirs = load_tokenizer(describe(str(file))), reference(pre, tokenizer.backend_tokenizer)
    for text in (*TEXTS, "cafe\u0301"):
        ids = ours(text)["input_ids"]
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def sentence_piece() -> tuple[dict[str, object], Tokenizer]:
    """Metadata of SentencePiece's kind with byte fallback, and the tokenizer as Llama 2's files have it."""
    pieces = ["▁", "a", "f", "o", "x", "t", "h", "e", "▁a", "▁f", "ox", "▁fox", "th", "the", "▁the", "oo", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces]
    scores = [0.0] * 259 + [-float(number) for number in range(len(pieces))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    metadata = {"model": "llama", "pre": None, "tokens": tokens, "scores": scores, "token_type": kinds, "merges": None}
    merges = [("▁", "a"), ("▁", "f"), ("o", "x"), ("▁f", "ox"), ("t", "h"), ("th", "e"), ("▁", "the"), ("o", "o")]
    numbers = {token: number for number, token in enumerate(tokens)}
    bpe = models.BPE(numbers, [*merges, ("▁", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    whole = Tokenizer(bpe)
    whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    whole.decoder = decoders.Sequence(steps)
    whole.add_special_tokens(["<unk>", "<s>", "</s>"])
    whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return {f"tokenizer__ggml__{key}": value for key, value in metadata.items()}, whole


def test_sentence_piece_is_read(model_folder: ModelFolder, tmp_path: Path) -> None:
    metadata, theirs = sentence_piece()
    file = write_model(tmp_path / "model.gguf", model_folder("llama"), "F32", **metadata)
    info = describe(str(file))
    ours = load_tokenizer(info)
    assert info.eos_token_ids == {2}
    for text in ("the fox", " a  fox the é 🦊", "oo<s>fox", ""):
        ids = ours(text)["input_ids"]
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert ours("the fox")["input_ids"] == [1, 273, 270]
    metadata |= {"tokenizer__ggml__add_space_prefix": False, "tokenizer__ggml__add_bos_token": False}
    plain = load_tokenizer(describe(str(write_model(file, model_folder("llama"), "F32", **metadata))))
    assert plain("the fox")["input_ids"] == [272, 270]


def test_a_tokenizer_beside_the_file_serves_one_without(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("llama")
    file = write_model(tmp_path / "model.gguf", folder, "F32", tokenizer__ggml__pre="unheard-of")
    with pytest.raises(
        ValueError, match=r"pre-tokenizer 'unheard-of', .* are read; put the model's tokenizer.json bes"
    ):
        describe(str(file))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    assert texts(OrdinaryDecoding(file)) == texts(OrdinaryDecoding(folder))
    write_model(
        file,
        folder,
        "F32",
        tokenizer__ggml__model="none",
        tokenizer__ggml__tokens=None,
        tokenizer__ggml__token_type=None,
    )
    assert texts(OrdinaryDecoding(file)) == texts(OrdinaryDecoding(folder))


def doubled(folder: Path, of: int, to: int) -> dict[str, object]:
    """Metadata of a folder's tokenizer as makers ship it, in whose file one token has another one's text."""
    tokens = list(tokenizer_parts(folder)["tokenizer.ggml.tokens"])
    tokens[to] = tokens[of]
    return {"tokenizer__ggml__tokens": tokens}


UNMERGED = 190
"""A token that no merge is of: as a byte, it is in none of the tests' texts."""


def test_two_equal_tokens_are_odd_and_no_damage(model_folder: ModelFolder, tokenizer, tmp_path: Path, caplog) -> None:
    """The last of them stands for the text, as llama.cpp and transformers read it, unless the file says otherwise."""
    folder, text = model_folder("llama"), tokenizer.convert_ids_to_tokens(290)
    file = write_model(tmp_path / "model.gguf", folder, "F32", **doubled(folder, 290, UNMERGED))
    ours = load_tokenizer(describe(str(file)))
    assert "has 2 tokens whose texts are not theirs alone, such as" in caplog.text
    assert ours.convert_tokens_to_ids(text) == 290
    for words in TEXTS:
        assert ours(words)["input_ids"] == tokenizer(words)["input_ids"]
        assert ours.decode(ours(words)["input_ids"]) == words
    assert ours.decode([UNMERGED, 290]) == 2 * tokenizer.decode([290]), "both are that text"
    assert len(ours) == len(tokenizer)
    early = write_model(file, folder, "F32", **doubled(folder, UNMERGED, 290) | {"tokenizer__ggml__merges": ["Ġ t"]})
    byte = tokenizer.convert_ids_to_tokens(UNMERGED)
    assert load_tokenizer(describe(str(early))).convert_tokens_to_ids(byte) == 290
    named = {"tokenizer__ggml__eos_token_id": UNMERGED, "tokenizer__ggml__merges": ["Ġ t"]}
    write_model(file, folder, "F32", **doubled(folder, UNMERGED, 290) | named)
    info = describe(str(file))
    assert (info.eos_token_ids, load_tokenizer(info).eos_token_id) == ({UNMERGED}, UNMERGED)
    kinds = [3 if number in (0, UNMERGED) else 1 for number in range(300)]
    of_kinds = {"tokenizer__ggml__token_type": kinds, "tokenizer__ggml__merges": ["Ġ t"]}
    write_model(file, folder, "F32", **doubled(folder, UNMERGED, 290) | of_kinds)
    assert load_tokenizer(describe(str(file))).convert_tokens_to_ids(byte) == UNMERGED, "a special one"


def test_two_equal_pieces_are_odd_and_no_damage(model_folder: ModelFolder, tmp_path: Path) -> None:
    metadata, theirs = sentence_piece()
    tokens = metadata["tokenizer__ggml__tokens"]
    metadata["tokenizer__ggml__tokens"] = [*tokens[:258], "the", *tokens[259:]]
    file = write_model(tmp_path / "model.gguf", model_folder("llama"), "F32", **metadata)
    ours = load_tokenizer(describe(str(file)))
    for text in ("the fox", " a  fox the"):
        assert ours(text)["input_ids"] == theirs.encode(text).ids
    assert ours.decode([258, 272]) == "thethe"


def test_the_tokenizer_beside_a_file_with_equal_tokens_serves_it(model_folder: ModelFolder, tmp_path: Path) -> None:
    """It has the text that the file has lost."""
    folder = model_folder("llama")
    file = write_model(tmp_path / "model.gguf", folder, "F32", **doubled(folder, 290, UNMERGED))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    ours, theirs = load_tokenizer(describe(str(file))), load_tokenizer(describe(str(folder)))
    assert ours.get_vocab() == theirs.get_vocab()
    assert texts(OrdinaryDecoding(file)) == texts(OrdinaryDecoding(folder))


def test_a_tokenizer_beside_the_file_of_another_model_is_left(model_folder, tmp_path, caplog) -> None:
    folder = model_folder("llama")
    file = write_model(tmp_path / "model.gguf", folder, "F32")
    described = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert texts(OrdinaryDecoding(file)) == texts(OrdinaryDecoding(folder))
    assert "is not the tokenizer of" in caplog.text
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="has a tokenizer beside it, .*, that cannot be read"):
        describe(str(file))


REFUSED = {
    "another architecture": ({"general__architecture": "bert"}, "the architecture 'bert', llama, .* are read as GGUF"),
    "no architecture": ({"general__architecture": None}, "lacks general.architecture"),
    "an adapter": ({"general__type": "adapter"}, "holds no model but general.type 'adapter'"),
    "a part": ({"split__count": 3}, "is one of 3 parts; give it its name, NAME-00001-of-00003.gguf"),
    "experts": ({"llama__expert_count": 8}, "lacks llama.expert_used_count"),
    "shared experts": ({"llama__expert_shared_count": 8}, "the setting 'llama.expert_shared_count' [(]8[)], which"),
    "scaled logits": ({"llama__logit_scale": 0.5}, "has the setting 'llama.logit_scale'"),
    "a window": ({"llama__attention__sliding_window": 64}, "has the setting 'llama.attention.sliding_window'"),
    "part rotary": ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count 4 for heads of 8 numbers"),
    "other values": ({"llama__attention__value_length": 4}, "llama.attention.value_length 4 for heads of 8"),
    "su rotary": ({"llama__rope__scaling__type": "su"}, "rope.scaling.type 'su'; none, linear, yarn, longrope are"),
    "long rotary": ({"llama__rope__scaling__type": "longrope"}, "lacks the tensor rope_factors_short.weight"),
    "rotary that stands still": (
        {"llama__rope__freq_base": 1.0, **{f"llama__rope__scaling__{key}": value for key, value in YARN.items()}},
        "says what no llama can be: ZeroDivisionError",
    ),
    "no epsilon": ({"llama__attention__layer_norm_rms_epsilon": None}, "lacks llama.attention.layer_norm_rms_epsilon"),
    "infinite theta": ({"llama__rope__freq_base": float("inf")}, "says that llama.rope.freq_base is inf"),
    "no layers": ({"llama__block_count": 0}, "says that llama.block_count is 0"),
    "many layers": ({"llama__block_count": 5}, "lacks the tensor blk.4."),
    "few layers": ({"llama__block_count": 3}, "has 'blk.3.attn_norm.weight', which no llama has here"),
    "a text for layers": ({"llama__block_count": "4"}, "says that llama.block_count is 4"),
    "mixed heads": ({"llama__attention__head_count_kv": [2, 2, 1, 2]}, "different llama.attention.head_count_kv"),
    "more heads": ({"llama__attention__head_count": 8}, r"blk.0.attn_q.weight has the shape .*, by .* \[64, 32\]"),
    "wide": ({"llama__feed_forward_length": 128}, r"blk.0.ffn_gate.weight has the shape \[64, 32\], by .* \[128, 32\]"),
    "other width": ({"llama__embedding_length": 64}, "token_embd.weight has the shape .*, for 64 inputs"),
    "more tokens": ({"llama__vocab_size": 301}, "301 tokens and 300 rows of token_embd.weight"),
    "odd alignment": ({"general__alignment": 48}, "general.alignment is 48"),
    "another tokenizer": ({"tokenizer__ggml__model": "t5"}, "tokenizer of the kind 't5', gpt2 and llama are read; put"),
    "strange merges": ({"tokenizer__ggml__merges": ["q zz"]}, "the merge 'q zz' is not of its tokens"),
    "tokens all alike": ({"tokenizer__ggml__tokens": ["a"] * 300}, "the merge 'Ġ t' is not of its tokens"),
    "few kinds": ({"tokenizer__ggml__token_type": [1, 1]}, "token_type holds no number for each token"),
    "an end beyond": ({"tokenizer__ggml__eos_token_id": 300}, "eos_token_id is 300, of 300 tokens"),
    "long positions": ({"llama__context_length": 2**30}, "says that llama.context_length is 1073741824"),
}  # fmt: skip


def test_packed_weights_need_their_products(model_folder: ModelFolder, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(kept, "is_available", lambda *_: False)
    refused(
        write_model(tmp_path / "a.gguf", model_folder("llama"), "Q4_0"), "has weights of few bits, which need Linux"
    )
    describe(str(write_model(tmp_path / "b.gguf", model_folder("llama"), "F16")))


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_is_one_line(model_folder: ModelFolder, tmp_path: Path, what: str) -> None:
    changed, reason = REFUSED[what]
    file = write_model(tmp_path / "model.gguf", model_folder("llama"), "F32", **changed)
    refused(file, reason)


def refused(file: Path, reason: str) -> None:
    """The file is refused in one line, and nothing of it is left."""
    with pytest.raises(ValueError, match=reason) as caught:
        describe(str(file))
    assert str(caught.value).startswith(f"model {str(file)!r} ")
    assert "\n" not in str(caught.value)
    kept_now = kept.cache_folder() / "gguf"
    assert not kept_now.exists() or not [path for path in kept_now.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    "damage",
    ["scale", "factors", "few factors", "table of factors", "unknown tensor", "bias", "shape", "vector", "twice"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(model_folder, tmp_path, damage) -> None:
    metadata, tensors = model_parts(model_folder("llama"), "Q8_0")
    kind, shape, content = tensors["blk.1.attn_v.weight"]
    changed: dict[str, tuple[dict[str, Stored], str]] = {
        "scale": (
            {"blk.1.attn_v.weight": (kind, shape, b"\0\x7c" + content[2:])},
            "a scale of blk.1.attn_v.weight is not finite",
        ),
        "factors": (
            {"rope_freqs.weight": stored(torch.tensor([1.0, 2.0, -3.0, 8.0]), "F32")},
            "a factor of rope_freqs.weight is no number above 0",
        ),
        "few factors": (
            {"rope_freqs.weight": stored(torch.ones(3), "F32")},
            "rope_freqs.weight has 3 numbers, for heads of 8",
        ),
        "table of factors": (
            {"rope_freqs.weight": stored(torch.ones(2, 4), "F32")},
            r"rope_freqs.weight is \[2, 4\] in F32",
        ),
        "unknown tensor": ({"blk.1.attn_sinks.weight": stored(torch.ones(4), "F32")}, "has 'blk.1.attn_sinks.weight'"),
        "bias": ({"blk.1.attn_q.bias": stored(torch.ones(32), "F32")}, "has 'blk.1.attn_q.bias', which no llama has"),
        "shape": ({"blk.1.ffn_gate.weight": stored(torch.ones(32, 64), "F32")}, "blk.1.ffn_gate.weight has the shape"),
        "vector": ({"blk.1.attn_norm.weight": ("Q8_0", (32,), bytes(34))}, "has blk.1.attn_norm.weight in Q8_0, and"),
        "twice": ({}, "has the tensor 'blk.0.attn_k.weight' twice"),
    }
    more, reason = changed[damage]
    file = write_gguf(tmp_path / "model.gguf", metadata, tensors | more)
    if damage == "twice":
        file.write_bytes(file.read_bytes().replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"))
    refused(file, reason)


def header(*parts: bytes, version: int = 3, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + b"".join(parts)


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


HUGE = 2**62
WRONG = {
    "nothing": (b"", "is no GGUF file"),
    "another file": (b"PK\3\4" + bytes(100), "is no GGUF file"),
    "version 1": (header(version=1), "has GGUF version 1, 2 and 3 are read"),
    "version 4": (header(version=4), "has GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
    "counts": (header(values=HUGE), "it says that 4611686018427387904 entries follow"),
    "tensors": (header(tensors=HUGE), "it says that 4611686018427387904 entries follow"),
    "long key": (header(text(b"k", HUGE), bytes(100), values=1), "a key of 4611686018427387904 bytes"),
    "no UTF-8": (header(text(b"\xff"), bytes(100), values=1), "a key is no UTF-8"),
    "unknown value": (header(text(b"k"), struct.pack("<I", 13), bytes(100), values=1), "metadata of type 13"),
    "truth": (header(text(b"k"), struct.pack("<IB", 7, 2), bytes(100), values=1), "a truth value of 2"),
    "long text": (header(text(b"k"), struct.pack("<IQ", 8, HUGE), bytes(100), values=1), "a text of 46116"),
    "long array": (header(text(b"k"), struct.pack("<IIQ", 9, 4, HUGE), bytes(100), values=1), "that 46116.* entries"),
    "long texts": (header(text(b"k"), struct.pack("<IIQ", 9, 8, 2**21), bytes(99), values=1), "that 2097152 entries"),
    "arrays": (header(text(b"k"), struct.pack("<IIQ", 9, 9, 1), bytes(100), values=1), "arrays of arrays"),
    "a key twice": (header(*[text(b"k"), struct.pack("<IB", 0, 1)] * 2, bytes(9), values=2), "has the key 'k' twice"),
    "dimensions": (header(text(b"t"), struct.pack("<I", 9), bytes(99), tensors=1), "tensor 't' has 9 dimensions"),
    "empty": (header(text(b"t"), struct.pack("<IQIQ", 1, 0, 0, 0), bytes(99), tensors=1), "tensor 't' is empty"),
    "large": (header(text(b"t"), struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0), bytes(99), tensors=1), "beyond its end"),
    "far": (header(text(b"t"), struct.pack("<IQIQ", 1, 1, 0, HUGE), bytes(99), tensors=1), "beyond its end"),
    "between": (header(text(b"t"), struct.pack("<IQIQ", 1, 1, 0, 8), bytes(99), tensors=1), "between multiples of 32"),
    "part of a block": (header(text(b"t"), struct.pack("<IQIQ", 1, 33, 8, 0), bytes(99), tensors=1), "rows of 33"),
    "overlap": (
        header(*[text(name) + struct.pack("<IQIQ", 1, 9, 0, 0) for name in (b"t", b"u")], bytes(99), tensors=2),
        "overlaps another one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_wrong_in_itself_is_one_line(tmp_path: Path, what: str) -> None:
    content, reason = WRONG[what]
    (tmp_path / "model.gguf").write_bytes(content)
    refused(tmp_path / "model.gguf", reason)


def test_a_file_that_is_cut_short_anywhere_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf", model_folder("llama"), "Q8_0").read_bytes()
    file, drawn = tmp_path / "model.gguf", random.Random(2)
    for length in [*range(0, 200, 7), *(drawn.randrange(200, len(whole) - 32) for _ in range(100))]:
        file.write_bytes(whole[:length])
        refused(file, "is cut short|is no GGUF file")


def test_random_damage_is_one_line_or_opens(model_folder: ModelFolder, tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf", model_folder("llama", num_layers=2), "Q8_0").read_bytes()
    header_ends = whole.index(b"blk.1.ffn_up.weight")
    file, drawn, opened = tmp_path / "model.gguf", random.Random(3), 0
    describe(str(tmp_path / "whole.gguf"))  # what is imported once counts for none of them
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(FLIPS):
        content = bytearray(whole)
        for _ in range(drawn.choice([1, 1, 2, 8])):
            end = drawn.choice([header_ends, len(content)])
            content[drawn.randrange(end)] = drawn.choice([0, 1, 0x7F, 0x80, 0xFF, drawn.randrange(256)])
        file.write_bytes(content)
        try:
            load_tokenizer(describe(str(file)))
            opened += 1
        except ValueError as error:
            assert "\n" not in str(error), error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB, of a file of 100
    assert opened > FLIPS // 20


def test_values_that_nobody_expects_are_one_line_or_open(model_folder: ModelFolder, tmp_path: Path) -> None:
    metadata, tensors = model_parts(model_folder("llama", num_layers=2), "Q8_0")
    file, drawn, opened = tmp_path / "model.gguf", random.Random(4), 0
    numbers, words = (
        [0, 1, 2, 3, 7, 64, 2**20, 2**31 - 1, -1, 0.0, 0.5, 1e30, float("nan"), float("inf")],
        ["x", "", "▁"],
    )
    for _ in range(FLIPS // 3):
        changed = dict(metadata)
        for key in drawn.sample(list(metadata), drawn.choice([1, 1, 2])):
            value = metadata[key]
            if isinstance(value, list) and drawn.random() < 0.7:
                some = [value[0]] if isinstance(value[0], str) else numbers[:9]
                changed[key] = [*value[:5], drawn.choice([*some, *(words if some == [value[0]] else [])]), *value[6:]]
            else:
                changed[key] = drawn.choice([*numbers, *words, True, [1, 2], ["a"]])
        write_gguf(file, changed, tensors)
        try:
            load_tokenizer(describe(str(file)))
            opened += 1
        except ValueError as error:
            assert "\n" not in str(error), error
    assert opened


@pytest.mark.parametrize(("number", "name"), [(16, "IQ2_XXS"), (24, "I8"), (99, "type 99")])
def test_a_tensor_of_another_type_is_named(tmp_path: Path, number: int, name: str) -> None:
    metadata = {"general.architecture": "llama"}
    file = write_gguf(tmp_path / "model.gguf", metadata, {"output.weight": ("F32", (2, 2), bytes(16))})
    content = file.read_bytes().replace(struct.pack("<IQQI", 2, 2, 2, 0), struct.pack("<IQQI", 2, 2, 2, number))
    file.write_bytes(content)
    refused(file, f"has 'output.weight' in {name}; F32, F16, BF16, .* are read")


def test_the_reader_agrees_with_the_formats_own(model_folder: ModelFolder, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", model_folder("qwen2"), "Q8_0", general__truth=True)
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in ours.metadata.items():
        found = fields[key].contents()
        assert found == (value.tolist() if isinstance(value, np.ndarray) else value), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        one = ours.tensors[tensor.name]
        assert (one.kind, one.start, one.num_bytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert one.shape == tuple(int(size) for size in tensor.shape)[::-1]
