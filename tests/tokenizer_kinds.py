"""Small tokenizers of every kind: what makes text of their tokens differs, and so does where a space comes from."""

from pathlib import Path

from models_for_tests import build_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")
FIRST_BYTE = len(SPECIAL)
"""Of the vocabularies that have bytes; `FIRST_BYTE + 0x41` is the token `<0x41>`."""
FIRST_WORD = FIRST_BYTE + 256
WORDS = ("▁", "▁the", "▁dog", "▁a", "n", "'", "t", "do", "▁do", "e", ".", "▁▁", ",", "ing", "▁.", "▁'", "é", "日")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_WORD_PIECES = ("dog", "##ing", "the", "##s", ".", "?", "'", "n't", "##n't", "do", "é", "##é", "<0x41>")
_ENDED_PIECES = ("a", "a</w>", "dog</w>", "do", "g</w>", ".</w>", "é</w>")


def sentencepiece_like(strips: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have: spaces at the beginning of tokens, the text's first dropped, bytes for the rest.

    Without `strips` as Gemma has, whose texts keep their first space.
    """
    pieces = [(text, 0.0) for text in SPECIAL] + [(byte, -20.0) for byte in _BYTES] + [(word, -3.0) for word in WORDS]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    prepend, strip = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if strips else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return _whole(tokenizer)


def metaspace(prepend_scheme: str) -> PreTrainedTokenizerFast:
    """Spaces at the beginning of tokens, without bytes."""
    tokenizer = Tokenizer(models.Unigram([(text, -3.0) for text in (*SPECIAL, *WORDS, "\ufffd")], unk_id=0))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme, split=False)
    return _whole(tokenizer)


def word_pieces(cleans_up: bool = False) -> PreTrainedTokenizerFast:
    """As BERT's: a space before each token that does not say that it goes on with the one before."""
    tokenizer = Tokenizer(models.WordPiece(_numbers(_WORD_PIECES), unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _whole(tokenizer, clean_up_tokenization_spaces=cleans_up)


def whole_words(cleans_up: bool = False) -> PreTrainedTokenizerFast:
    """Words, with a space between any two."""
    tokenizer = Tokenizer(models.WordLevel(_numbers(_WORD_PIECES), unk_token="<unk>"))
    return _whole(tokenizer, clean_up_tokenization_spaces=cleans_up)


def ended_pieces() -> PreTrainedTokenizerFast:
    """As GPT's first: a mark at a word's end, which is a space where another word follows."""
    tokenizer = Tokenizer(models.BPE(_numbers(_ENDED_PIECES), [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return _whole(tokenizer)


class InPython(PreTrainedTokenizer):
    """One that is no fast one: as SentencePiece's are there, which also drop the spaces at a text's end."""

    @property
    def vocab_size(self) -> int:
        return len(SPECIAL + WORDS)

    def get_vocab(self) -> dict[str, int]:
        return _numbers(WORDS)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return (SPECIAL + WORDS)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ").strip()


def _numbers(pieces: tuple[str, ...]) -> dict[str, int]:
    return {text: number for number, text in enumerate((*SPECIAL, *pieces))}


def _whole(tokenizer: Tokenizer, **settings: bool) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(list(SPECIAL))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **settings)


KINDS: dict[str, PreTrainedTokenizerBase] = {
    "byte-level": build_tokenizer(),
    "SentencePiece with bytes": sentencepiece_like(),
    "SentencePiece with bytes and a first space": sentencepiece_like(strips=False),
    "Metaspace": metaspace("always"),
    "Metaspace with a first space": metaspace("never"),
    "word pieces": word_pieces(),
    "words": whole_words(),
    "ended pieces": ended_pieces(),
    "in Python": InPython(bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
}


def with_tokenizer(folder: Path, copy: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A model folder's copy that has another tokenizer."""
    for file in folder.iterdir():
        if "token" not in file.name:
            (copy / file.name).symlink_to(file)
    tokenizer.save_pretrained(copy)
    return copy


def has_bytes(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its vocabulary has a token for each byte beside words."""
    return tokenizer.convert_ids_to_tokens(FIRST_BYTE) == _BYTES[0]
