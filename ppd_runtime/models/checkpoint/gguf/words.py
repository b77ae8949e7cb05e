"""How byte-level tokenizers cut a text into words, by the names that GGUF files give them.

Each row follows the models' own tokenizers, which llama.cpp does not always match under the name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3, _QWEN2 = _CASED % r"\p{N}{1,3}", _CASED % r"\p{N}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_LARGE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(ending: str, digits: str) -> str:
    """Words that end where a small letter precedes a capital."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_LARGE}*{_SMALL}+{ending}|{start}{_LARGE}+{_SMALL}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT4O, _TEKKEN = _by_case(f"{_ENDINGS}?", r"\p{N}{1,3}"), _by_case("", r"\p{N}")
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_CHINESE = "[一-龥\u0800-一가-\ud7ff]+"
_LETTERS = (
    "A-Za-z"
    "µÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι"
    "ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻"
    "𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_LINE_ENDS, _PUNCTUATION = "[\r\n]", r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DIGITS, _NUMBERS = (pre_tokenizers.Digits(individual_digits=each) for each in (True, False))
_THREES = "[0-9][0-9][0-9]"
_TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
"""Spells words in the characters that stand for bytes."""


@dataclass(frozen=True)
class Words:
    """How a text is cut into words."""

    cuts: Sequence[str | Any]
    """Regular expressions or the library's own cuts, in order; those after `_TO_BYTES` see bytes."""
    form: str | None = None
    """The Unicode form that texts are normalised to."""
    whole_first: bool = False
    """Whether a word that is a token skips the merges."""
    begun: bool = False
    """Whether a text begins with BOS if the file does not say it."""

    def normalizer(self) -> Any:
        """The normalizer of a text; None if it stays as it is."""
        return {None: lambda: None, "NFC": normalizers.NFC, "NFKC": normalizers.NFKC}[self.form]()

    def pre_tokenizer(self) -> Any:
        """Cuts a text into words of bytes."""
        cuts = [*self.cuts] if _TO_BYTES in self.cuts else [*self.cuts, _TO_BYTES]
        own = [pre_tokenizers.Split(Regex(cut), behavior="isolated") if isinstance(cut, str) else cut for cut in cuts]
        return pre_tokenizers.Sequence(own)


WORDS: Mapping[str, Words] = {
    name: words
    for names, words in (
        ("default", Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREES))),
        ("gpt-2 jais trillion granite-docling a.x-4.0 mellum", Words((_GPT2,))),
        ("olmo mpt", Words((_GPT2,), "NFC")),
        ("exaone4", Words((_GPT2,), "NFKC")),
        ("smollm starcoder refact codeshell minerva-7b", Words((_DIGITS, _GPT2))),
        ("command-r", Words((_DIGITS, _GPT2), "NFC")),
        ("exaone", Words((_DIGITS, _GPT2), "NFKC")),
        ("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2", Words((_LLAMA3,), whole_first=True, begun=True)),
        ("smaug-bpe glm4 chatglm-bpe", Words((_LLAMA3,), whole_first=True)),
        ("dbrx", Words((_LLAMA3,))),
        ("minicpm5", Words((r"\p{N}{1,3}", _CASED % r"\p{N}+"))),
        ("qwen2 deepseek-r1-qwen stablelm2 hunyuan bailingmoe", Words((_QWEN2,), "NFC")),
        ("megrez kormo", Words((_QWEN2,))),
        ("qwen35", Words((_QWEN35,), "NFC")),
        ("seed-coder", Words((_SEED,), "NFC")),
        ("gpt-4o llama4", Words((_GPT4O,), whole_first=True)),
        ("tekken", Words((_TEKKEN,), whole_first=True, begun=True)),
        ("deepseek-v3 hunyuan-dense", Words(_DEEPSEEK3)),
        (
            "deepseek-llm",
            Words((_LINE_ENDS, rf"\s?[{_LETTERS}]+", _PUNCTUATION, r"\s+$", _CHINESE, _DIGITS)),
        ),
        ("deepseek-coder", Words((_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, _DIGITS))),
        ("bloom poro-chat gpt3-finnish", Words((_BLOOM,))),
        ("viking", Words((_BLOOM, _DIGITS))),
        ("falcon", Words((pre_tokenizers.Punctuation("contiguous"), _GPT2, _TO_BYTES, _NUMBERS, _THREES))),
        ("superbpe", Words((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    )
    for name in names.split()
}
"""Rows by `tokenizer.ggml.pre`."""
