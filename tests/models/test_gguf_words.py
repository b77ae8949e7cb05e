"""What GGUF files' tokenizers make of texts: how each pre-tokenizer cuts them, and what special tokens do."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppd_runtime.models.checkpoint.gguf.reader import GGUF
from ppd_runtime.models.checkpoint.gguf.tokenizer import write_tokenizer
from ppd_runtime.models.checkpoint.gguf.words import WORDS

TEXTS = ("I'LL can't 12345 x²", "Hi  there\n\n ok!\n", "helloWORLD iPhone/\n", "नमस्ते 東京の人ab", "aé,b  7")
CUT = r"""
default
I|'|LL| can|'|t| |123|45| x|²¦Hi| | there|\n\n| ok|!|\n¦helloWORLD| iPhone|/|\n¦नमस|्|त|े| 東京の人ab¦aé|,|b| | |7
gpt-2 jais trillion granite-docling a.x-4.0 mellum olmo mpt exaone4
I|'|LL| can|'t| 12345| x|²¦Hi| | there|\n\n| ok|!|\n¦helloWORLD| iPhone|/|\n¦नमस|्|त|े| 東京の人ab¦aé|,|b| | 7
smollm starcoder refact codeshell minerva-7b command-r exaone
I|'|LL| can|'t| |1|2|3|4|5| x|²¦Hi| | there|\n\n| ok|!|\n¦helloWORLD| iPhone|/|\n¦नमस|्|त|े| 東京の人ab¦aé|,|b|  |7
llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2 smaug-bpe glm4 chatglm-bpe dbrx
I|'LL| can|'t| |123|45| x|²¦Hi| | there|\n\n| ok|!\n¦helloWORLD| iPhone|/\n¦नमस|्त|े| 東京の人ab¦aé|,b| | |7
minicpm5
I|'LL| can|'t| |123|45| x|²¦Hi| | there|\n\n| ok|!\n¦helloWORLD| iPhone|/\n¦नमस|्त|े| 東京の人ab¦aé|,b|  |7
qwen2 deepseek-r1-qwen stablelm2 hunyuan bailingmoe megrez kormo
I|'LL| can|'t| |1|2|3|4|5| x|²¦Hi| | there|\n\n| ok|!\n¦helloWORLD| iPhone|/\n¦नमस|्त|े| 東京の人ab¦aé|,b| | |7
qwen35
I|'LL| can|'t| |1|2|3|4|5| x|²¦Hi| | there|\n\n| ok|!\n¦helloWORLD| iPhone|/\n¦नमस्ते| 東京の人ab¦aé|,b| | |7
seed-coder
I|'LL| can|'t| |1|2|3|4|5| x|²¦Hi| | there|\n\n| ok|!|\n¦helloWORLD| iPhone|/|\n¦नमस|्त|े| 東京の人ab¦aé|,b| | |7
gpt-4o llama4
I'LL| can't| |123|45| x|²¦Hi| | there|\n\n| ok|!\n¦hello|WORLD| i|Phone|/\n¦नमस्ते| 東京の人ab¦aé|,b| | |7
tekken
I|'LL| can|'t| |1|2|3|4|5| x|²¦Hi| | there|\n\n| ok|!\n¦hello|WORLD| i|Phone|/\n¦नमस्ते| 東京の人ab¦aé|,b| | |7
deepseek-v3 hunyuan-dense
I|'LL| can|'t| |123|45| x|²¦Hi| | there|\n\n| ok|!\n¦helloWORLD| iPhone|/\n¦नमस्ते| |東京の人|ab¦aé|,b|  |7
deepseek-llm
I|'|LL| can|'|t| |1|2|3|4|5| x|²¦Hi| | there|\n|\n| ok|!|\n¦helloWORLD| iPhone|/|\n¦नमस्ते| |東京の人|ab¦a|é|,|b|  |7
deepseek-coder
I|'|LL| can|'|t| |1|2|3|4|5| x|²¦Hi| | there|\n|\n| ok|!|\n¦helloWORLD| iPhone|/|\n¦नमस|्|त|े| |東京の人|ab¦aé|,|b|  |7
bloom poro-chat gpt3-finnish
I'LL| can't| 12345| x²¦Hi| | there|\n\n| ok|!\n¦helloWORLD| iPhone/|\n¦नमस्ते| 東京の人ab¦aé|,|b| | 7
viking
I'LL| can't| |1|2|3|4|5| x|²¦Hi| | there|\n\n| ok|!\n¦helloWORLD| iPhone/|\n¦नमस्ते| 東京の人ab¦aé|,|b| | |7
falcon
I|'|LL| can|'|t| |123|45| x|Â|²¦Hi| | there|\n\n| ok|!|\n¦helloWORLD| iPhone|/|\n¦नमस|्|त|े| 東京の人ab¦aé|,|b| | |7
superbpe
I'LL can't |12|345| x|²¦Hi  there\n\n ok!\n¦helloWORLD iPhone/\n¦नमस्ते 東京の人ab¦aé,b  |7
"""
"""The words of the texts, below the names that have them."""
FORMS = {
    "NFC": "olmo mpt command-r qwen2 deepseek-r1-qwen stablelm2 hunyuan bailingmoe qwen35 seed-coder",
    "NFKC": "exaone exaone4",
}
WHOLE = "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2 smaug-bpe glm4 chatglm-bpe gpt-4o llama4 tekken"
BEGUN = "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2 tekken"
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6


def spelt(text: str) -> str:
    """A text in the characters that stand for its bytes."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(word for word, _ in to_bytes.pre_tokenize_str(text))


@pytest.mark.parametrize(("names", "cuts"), list(zip(CUT.split("\n")[1::2], CUT.split("\n")[2::2], strict=False)))
def test_a_text_is_cut_into_words(names: str, cuts: str) -> None:
    for text, cut in zip(TEXTS, cuts.replace(r"\n", "\n").split("¦"), strict=True):
        bytes_alone = "Â²" if names == "falcon" else ""
        expected = [word if word in bytes_alone else spelt(word) for word in cut.split("|")]
        for name in names.split():
            assert [word for word, _ in WORDS[name].pre_tokenizer().pre_tokenize_str(text)] == expected, name


def test_every_name_is_tried() -> None:
    assert sorted(" ".join(CUT.split("\n")[1::2]).split()) == sorted(WORDS)


def built(folder: Path, metadata: Mapping[str, object], architecture: str = "llama") -> PreTrainedTokenizerFast:
    """The tokenizer of a file with this metadata, as a model folder has it."""
    whole = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    gguf = GGUF(folder / "model.gguf", {"general.architecture": architecture, **whole}, {})
    written = folder / "written"
    written.mkdir(exist_ok=True)
    write_tokenizer(gguf, len(metadata["tokens"]), written)
    return PreTrainedTokenizerFast.from_pretrained(written)


def of_bytes(pre: str, special: tuple[str, ...] = ("<s>",), merged: tuple[str, ...] = ()) -> dict[str, object]:
    """Metadata of a tokenizer whose tokens are bytes, some words that no merge makes, and special ones."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged, *special]
    kinds = np.array([NORMAL] * (len(tokens) - len(special)) + [CONTROL] * len(special))
    begin = {"bos_token_id": len(tokens) - len(special), "eos_token_id": len(tokens) - 1}
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": [], **begin}


@pytest.mark.parametrize("pre", WORDS)
def test_texts_take_their_form_and_their_beginning(tmp_path: Path, pre: str) -> None:
    ours = built(tmp_path, of_bytes(pre, merged=("ab",)))
    form = next((form for form, names in FORMS.items() if pre in names.split()), None)
    assert (
        ours.decode(ours.encode("ﬁ e\u0301", add_special_tokens=False))
        == {
            None: "ﬁ e\u0301",
            "NFC": "ﬁ é",
            "NFKC": "fi é",
        }[form]
    )
    assert ours.tokenize("ab") == (["ab"] if pre in WHOLE.split() else ["a", "b"])
    assert ours.convert_ids_to_tokens(ours("b")["input_ids"]) == ["<s>", "b"][pre not in BEGUN.split() :]


PIECES = ("▁", "a", "b", "\n", "▁a")
"""Of SentencePiece's kind."""


def of_pieces(user_defined: tuple[str, ...], special: tuple[str, ...], **others: object) -> dict[str, object]:
    """Metadata of a tokenizer of pieces, as the converter has them: scores say nothing of the ones that were added."""
    tokens = [*special, *user_defined, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [CONTROL] * len(special) + [USER_DEFINED] * len(user_defined) + [BYTE] * 256 + [NORMAL] * len(PIECES)
    scores = [-1000.0] * (len(special) + len(user_defined)) + [0.0] * 256 + [-float(n) for n in range(len(PIECES))]
    numbers = {f"{name}_token_id": tokens.index(text) for name, text in others.pop("named", {}).items()}
    whole = {"model": "llama", "tokens": tokens, "token_type": np.array(kinds), "scores": np.array(scores)}
    return {**whole, **numbers, **others}


GEMMA = of_pieces(
    ("\n\n", "  ", "   "),
    ("<pad>", "<eos>", "<bos>", "<unk>"),
    named={"padding": "<pad>", "eos": "<eos>", "bos": "<bos>", "unknown": "<unk>"},
    add_space_prefix=False,
)


def test_gemmas_spaces_are_merged_and_its_line_ends_are_found_first(tmp_path: Path) -> None:
    ours = built(tmp_path, GEMMA, "gemma2")
    assert ours.tokenize("a  b a") == ["a", "▁▁", "b", "▁a"]
    assert ours.tokenize("     b") == ["▁▁▁", "▁▁", "b"], "the longest first"
    assert ours.tokenize("    a") == ["▁▁▁", "▁a"]
    assert ours.tokenize("a\n\n\nb") == ["a", "\n\n", "\n", "b"]
    for text in ("a  b", "   a", " a\n\n b "):
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text


def test_gemmas_own_tokenizer_beside_the_file_is_taken(tmp_path: Path, caplog) -> None:
    (tmp_path / "written").mkdir()
    gguf = GGUF(tmp_path / "model.gguf", {f"tokenizer.ggml.{key}": value for key, value in GEMMA.items()}, {})
    write_tokenizer(gguf, len(GEMMA["tokens"]), tmp_path / "written")
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "written" / "tokenizer.json").read_bytes())
    assert '"▁▁▁"' in (tmp_path / "tokenizer.json").read_text()
    write_tokenizer(gguf, len(GEMMA["tokens"]), tmp_path / "written")
    assert "is not the tokenizer of" not in caplog.text


def test_phis_special_tokens_take_the_space_after_them(tmp_path: Path) -> None:
    def found(ours: PreTrainedTokenizerFast, text: str) -> list[str]:
        return ours.convert_ids_to_tokens(ours.encode(text))

    ends = ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|end|>", "<|user|>")
    phi3 = of_pieces((), ends, named={"bos": "<s>", "eos": "<|endoftext|>", "unknown": "<unk>"}, add_bos_token=False)
    ours = built(tmp_path, phi3, "phi3")
    assert found(ours, "<|user|>\na<|end|> \n<|user|>") == ["<|user|>", "▁a", "<|end|>", "<|user|>"]
    assert found(ours, "<|endoftext|>\n</s>\na") == ["<|endoftext|>", "▁", "\n", "</s>", "▁a"]
    assert found(built(tmp_path, phi3), "<|end|>\n") == ["<|end|>", "▁", "\n"], "of another architecture"
    mini = built(tmp_path, of_bytes("gpt-4o", ("<|endoftext|>", "<|end|>")), "phi3")
    assert found(mini, "a <|end|> \na<|endoftext|> a") == ["a", "Ġ", "<|end|>", "a", "<|endoftext|>", "Ġ", "a"]
    phi4 = built(tmp_path, of_bytes("dbrx", ("<|im_start|>", "<|im_end|>")), "phi3")
    assert found(phi4, "a \n<|im_end|> \na <|im_start|> a") == ["a", "<|im_end|>", "a", "<|im_start|>", "a"]
