"""Writes the tokenizer in a GGUF file, or one beside it, as a model folder's.

Byte-level BPE (`gpt2`) and SentencePiece's BPE with scores (`llama`) are read; a text becomes the tokens that the
model's own tokenizer makes of it.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from ppd_runtime.models.checkpoint.gguf.reader import GGUF, Value, shown
from ppd_runtime.models.checkpoint.gguf.words import WORDS, Words
from ppd_runtime.models.checkpoint.hub import one_line

logger = logging.getLogger(__name__)
BESIDE = "tokenizer.json"
_WAY_OUT = f"put the model's {BESIDE} beside the file"
_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of tokens
_NOT_MERGED = _UNKNOWN, _CONTROL, _USER_DEFINED
_MOST_CHARACTERS = 2**10  # of a token
_TWIN = "\ufdd0"
"""A non-character between a token's text and its number, if another token has the bare text."""
_SPACE = "▁"
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_ENDS = {"<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"}
"""Tokens that end a text in llama.cpp too, though a file gives only their texts."""
_PHI = "phi3", "phimoe"
_PHI4 = "dbrx"
"""The pre-tokenizer of the Phi model whose special tokens also take the space before them."""
_KEEPING_SPACE = {"<unk>", "<s>", "<|endoftext|>", "<|endofprompt|>"}
"""Tokens of other Phi models that leave the space after them."""


def write_tokenizer(gguf: GGUF, vocab_size: int, folder: Path) -> list[int]:
    """Write the tokenizer's files, and give the tokens that end a text.

    A tokenizer beside the file is used if all its tokens are the file's.

    Args:
        gguf: the file.
        vocab_size: tokens that the model has logits for.
        folder: where a model folder's files are written.

    Raises:
        ValueError: for a tokenizer that is not supported, or inconsistent.
    """
    tokens = _Tokens(gguf.metadata, vocab_size)
    if tokens.doubled:
        odd = shown(tokens.texts[min(tokens.doubled)])
        logger.warning(
            "%s has %d tokens whose texts are not theirs alone, such as %s", gguf.path, len(tokens.doubled), odd
        )
    tokenizer = _beside(gguf.path, tokens) or tokens.tokenizer()
    known, template = tokenizer.get_vocab(), gguf.metadata.get("tokenizer.chat_template")
    named = {name: text for name, key in _SPECIAL.items() if (text := tokens.text(key)) in known}
    added = {str(token): token for token in tokenizer.get_added_tokens_decoder().values()}
    special = {name: added.get(text, text) for name, text in named.items()}
    try:
        whole = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            chat_template=template if isinstance(template, str) else None,
            clean_up_tokenization_spaces=False,
            **special,
        )
        whole.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises plain ones
        raise ValueError(f"has a tokenizer that cannot be built: {one_line(error)}; {_WAY_OUT}") from error
    return tokens.ends()


def _beside(path: Path, tokens: "_Tokens") -> Tokenizer | None:
    """The tokenizer beside the file, if its tokens are the file's; None if not, or if there is none."""
    beside = path.parent / BESIDE
    if not beside.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(beside))
    except Exception as error:  # the library raises plain ones
        raise ValueError(f"has a tokenizer beside it, {beside}, that cannot be read: {one_line(error)}") from error
    for text, number in tokenizer.get_vocab().items():
        if not tokens.may_be(number, text):
            logger.warning("%s is not the tokenizer of %s: token %d is %r there", beside, path, number, text)
            return None
    logger.info("the tokenizer of %s is %s", path, beside)
    return tokenizer


class _Tokens:
    """The tokens of a file, checked."""

    def __init__(self, metadata: Mapping[str, Value], vocab_size: int) -> None:
        self._metadata, self._vocab_size = metadata, vocab_size
        self.texts = [text or f"[EMPTY_{number}]" for number, text in enumerate(self._texts("tokens"))]
        """Texts by number."""
        if len(self.texts) > vocab_size:
            raise ValueError(f"is damaged: {len(self.texts)} tokens, and logits for {vocab_size}")
        if any(len(text) > _MOST_CHARACTERS for text in self.texts):
            raise ValueError(f"has a token of more than {_MOST_CHARACTERS} characters; {_WAY_OUT}")
        self._kinds = self._per_token("token_type", 1)
        self._runs = [number for number, text in enumerate(self.texts) if self._is_run(number, text)]
        """Gemma's tokens of several spaces, which the file spells as a text does; merges spell them otherwise."""
        for number in self._runs:
            self.texts[number] = _SPACE * len(self.texts[number])
        often = Counter(self.texts)
        self.doubled = {number for number, text in enumerate(self.texts) if often[text] > 1}
        """Tokens that share their text with others: odd, but some makers' files have them."""
        self._names = self._told_apart()
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def _is_run(self, number: int, text: str) -> bool:
        return self._model == "llama" and self._kinds[number] == _USER_DEFINED and set(text) == {" "}

    def _told_apart(self) -> list[str]:
        """The texts, made unique. A shared text stays that of the token that it encodes to: one that the file names, as
        its end, else a special one, else the last."""
        named = {self._number(key) for key in _SPECIAL.values()}
        ranked = sorted(self.doubled, key=lambda n: (n in named, self._kinds[n] in _NOT_MERGED, n))
        chosen = {self.texts[number]: number for number in ranked}
        of_twin = "{}" + _TWIN + "{}"
        return [of_twin.format(t, n) if chosen.get(t, n) != n else t for n, t in enumerate(self.texts)]

    @property
    def _model(self) -> str:
        return str(self._metadata.get(f"{_PREFIX}model", ""))

    @property
    def _pre(self) -> str:
        return str(self._metadata.get(f"{_PREFIX}pre", ""))

    def text(self, key: str) -> str | None:
        """The token of a key such as `eos_token_id`; None if the file names none."""
        number = self._number(key)
        return self.texts[number] if number is not None and number < len(self.texts) else None

    def may_be(self, number: int, text: str) -> bool:
        """Whether a token has this number in the file, or could have it if the file lists no tokens."""
        if not self.texts:
            return number < self._vocab_size
        return number < len(self.texts) and (self.texts[number] == text or number in self.doubled)

    def ends(self) -> list[int]:
        """Tokens that end a text."""
        named = [n for n, text in enumerate(self.texts) if text in _NAMED_ENDS and self._kinds[n] == _CONTROL]
        return sorted({number for key in _ENDS if (number := self._number(key)) is not None} | set(named))

    def tokenizer(self) -> Tokenizer:
        """The file's own tokenizer.

        Raises:
            ValueError: for a kind that is not read.
        """
        if self._model not in ("gpt2", "llama") or not self.texts:
            raise ValueError(f"has a tokenizer of the kind {shown(self._model)}, gpt2 and llama are read; {_WAY_OUT}")
        if self._model == "gpt2" and self._pre not in WORDS:
            known = ", ".join(WORDS)
            raise ValueError(f"has the pre-tokenizer {shown(self._pre)}, {known} are read; {_WAY_OUT}")
        try:
            tokenizer = self._byte_level(self._words) if self._words else self._sentence_piece()
        except ValueError:
            raise
        except Exception as error:  # the tokenizers library raises plain ones
            raise ValueError(f"has a tokenizer that cannot be built: {one_line(error)}; {_WAY_OUT}") from error
        if self.doubled:
            without_number = decoders.Replace(Regex(_TWIN + "[0-9]+$"), "")
            tokenizer.decoder = decoders.Sequence([without_number, tokenizer.decoder])
        pairs = list(zip(self._names, self._kinds, strict=True))
        tokenizer.add_special_tokens([self._added(text) for text, kind in pairs if kind in (_UNKNOWN, _CONTROL)])
        tokenizer.add_tokens([self._added(text) for text, kind in pairs if kind == _USER_DEFINED])
        self._frame(tokenizer)
        return tokenizer

    def _added(self, text: str) -> AddedToken:
        """A token that is matched before all others; Phi's take the space around them."""
        of_phi = self._metadata.get("general.architecture") in _PHI
        before = of_phi and self._model == "gpt2" and self._pre == _PHI4
        after = before or (of_phi and text not in _KEEPING_SPACE)
        return AddedToken(text, normalized=False, lstrip=before, rstrip=after)

    @property
    def _words(self) -> Words | None:
        """How a text is cut into words; None for another kind of tokenizer."""
        return WORDS.get(self._pre) if self._model == "gpt2" else None

    def _byte_level(self, words: Words) -> Tokenizer:
        merges = [self._merge(text) for text in self._texts("merges")]
        tokenizer = Tokenizer(models.BPE(vocab=self._numbers, merges=merges, ignore_merges=words.whole_first))
        if words.form:
            tokenizer.normalizer = words.normalizer()
        tokenizer.pre_tokenizer = words.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _merge(self, text: str) -> tuple[str, str]:
        """Two tokens that become one."""
        at = text.find(" ", 1)
        first, second = text[:at], text[at + 1 :]
        if at < 0 or any(part not in self._numbers for part in (first, second, first + second)):
            raise ValueError(f"is damaged: the merge {shown(text)} is not of its tokens")
        return first, second

    def _sentence_piece(self) -> Tokenizer:
        """A tokenizer like Llama's: pieces are merged in the order of their scores, runs of spaces first."""
        scores = self._per_token("scores", 0.0)
        for number in self._runs:
            scores[number] = math.inf
        found = []
        for text, score in zip(self._names, scores, strict=True):
            for at in range(1, len(text)):
                first, second = text[:at], text[at:]
                if first in self._numbers and second in self._numbers:
                    found.append((-score, -len(first), -len(second), first, second))
        found.sort(key=lambda merge: merge[:3])
        bpe = models.BPE(
            vocab=self._numbers,
            merges=[merge[3:] for merge in found],
            unk_token=self.text("unknown_token_id"),
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(bpe)
        spaced = bool(self._metadata.get(f"{_PREFIX}add_space_prefix", True))
        prefix, strip = ([normalizers.Prepend(_SPACE)], [decoders.Strip(" ", 1, 0)]) if spaced else ([], [])
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _frame(self, tokenizer: Tokenizer) -> None:
        """Begin texts with BOS and end them with EOS, if the file says so."""
        usual = {"bos": self._words.begun if self._words else True, "eos": False}
        framed = []
        for end, is_usual in usual.items():
            text = self.text(f"{end}_token_id")
            if text is not None and self._metadata.get(f"{_PREFIX}add_{end}_token", is_usual):
                framed.append({"id": end, "ids": [self._numbers[text]], "tokens": [text]})
        first, last = ([end["id"] for end in framed if end["id"] == name] for name in usual)
        if framed:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*first, "$A", *last], pair=[*first, "$A", "$B", *last], special_tokens=framed
            )

    def _number(self, key: str) -> int | None:
        number = self._metadata.get(_PREFIX + key)
        if number is None and self._model == "llama":
            number = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}.get(key)
        if number is None:
            return None
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self._vocab_size:
            raise ValueError(f"is damaged: {_PREFIX}{key} is {str(number)[:40]}, of {self._vocab_size} tokens")
        return number

    def _texts(self, key: str) -> list[str]:
        texts = self._metadata.get(_PREFIX + key, [])
        if not isinstance(texts, list):
            raise ValueError(f"is damaged: {_PREFIX}{key} holds no texts")
        return texts

    def _per_token(self, key: str, default: float) -> list[Any]:
        """A number for each token."""
        numbers = self._metadata.get(_PREFIX + key)
        if numbers is None:
            return [default] * len(self.texts)
        if not isinstance(numbers, np.ndarray) or len(numbers) != len(self.texts) or not np.isfinite(numbers).all():
            raise ValueError(f"is damaged: {_PREFIX}{key} holds no number for each token")
        found: list[Any] = numbers.tolist()
        return found
