"""Kinds of tokenizers, trained on the spot: every way to normalize, to cut, and to add tokens around a text."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[gMASK]",
    "<sop>",
    "en_XX",
    "[CLS]",
    "[SEP]",
    "<|im_start|>",
    "<|im_end|>",
]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
WORDS = ["the", "answer", "is", "four", "yes", "no", "user", "a", "of", "Two", "INSIDE", "naïve", "Größe"]
WORDS += ["assistant", "İstanbul", "être", "2", "42", "3.14", "def", "x"]
SIGNS = [
    *"🙂👍",
    "👩\u200d👩\u200d👧",
    "🇫🇷",
    "e\u0301",
    "o\u0323\u0302",
    "ﬁ",
    "①",
    "\u212b",
    "각",
    "\u1100\u1161",
]
SIGNS += [
    "文字",
    "日本",
    "سلام",
    "ß",
    "…",
    ",",
    ".",
    "(",
    "'s",
    '"',
    "\\",
    "_",
    "▁",
    "##",
    "{{",
    "<",
    "\u200b",
]


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer."""

    core: Tokenizer
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    spaces: str = "kept"
    """What it does to white space: `kept`, `marked` (spaces alone are changed), `dropped`."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with its prefix and suffix."""
        steps = (
            [processors.ByteLevel(trim_offsets=True)]
            if isinstance(self.core.decoder, decoders.ByteLevel)
            else []
        )
        names = [*self.prefix, "$A", *self.suffix]
        special = [(name, self.core.token_to_id(name)) for name in {*self.prefix, *self.suffix}]
        template = processors.TemplateProcessing(single=" ".join(names), special_tokens=special)
        self.core.post_processor = processors.Sequence([*steps, template])
        named = {"bos_token": "<s>"} if "<s>" in self.prefix else {}
        return PreTrainedTokenizerFast(
            tokenizer_object=self.core, eos_token="</s>", unk_token="<unk>", **named
        )

    def squeezed(self, text: str) -> bytes:
        """The normalized text without the white space that the tokenizer does not keep."""
        if self.core.normalizer is not None:
            text = self.core.normalizer.normalize_str(text)
        if self.spaces == "dropped":
            text = "".join(text.split())
        return self.squeeze(text.replace("▁", " ").encode() if self.spaces == "marked" else text.encode())

    def squeeze(self, spelling: bytes) -> bytes:
        """As `squeezed`, of what a token stands for."""
        if self.spaces == "kept":
            return spelling
        return spelling.replace(b" ", b"") if self.spaces == "marked" else b"".join(spelling.split()).lower()

    def spelling(self, token: str, added: set[str]) -> bytes:
        """The bytes that a token stands for."""
        if token in BYTE_PIECES:
            return bytes([int(token[3:5], 16)])
        if token in added:
            return token.encode()
        if isinstance(self.core.decoder, decoders.ByteLevel):
            return bytes(BYTE_OF[character] for character in token)
        return (token.replace("▁", " ") if self.spaces == "marked" else token.removeprefix("##")).encode()


def byte_level(normalizer: Any = None, regex: bool = True) -> Tokenizer:
    """Byte-level BPE."""
    core = Tokenizer(models.BPE())
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trained(
        core, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )


def sentence_pieces(scheme: str, unigram: bool = False) -> Tokenizer:
    """BPE or Unigram on words with a mark in place of each space."""
    core = Tokenizer(models.Unigram() if unigram else models.BPE(byte_fallback=True, unk_token="<unk>"))
    if scheme == "legacy":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=unigram)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    options: dict[str, Any] = {
        "vocab_size": 700,
        "special_tokens": SPECIAL + BYTE_PIECES,
        "show_progress": False,
    }
    if not unigram:
        return trained(core, trainers.BpeTrainer(limit_alphabet=50, **options))
    state = json.loads(trained(core, trainers.UnigramTrainer(unk_token="<unk>", **options)).to_str())
    state["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(state))


def word_pieces() -> Tokenizer:
    """BERT's."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return trained(
        core, trainers.WordPieceTrainer(vocab_size=900, special_tokens=SPECIAL, show_progress=False)
    )


def stripping() -> Tokenizer:
    """With added tokens that take the white space beside them."""
    core = byte_level()
    added = [
        AddedToken("<l>", lstrip=True),
        AddedToken("<r>", rstrip=True),
        AddedToken("Two", single_word=True),
    ]
    core.add_tokens(added)
    return core


def trained(core: Tokenizer, trainer: Any) -> Tokenizer:
    """Train on all pieces, each character also inside a word."""
    characters = sorted(
        {character for piece in WORDS + SIGNS for character in piece} | {*string.printable.strip()}
    )
    core.train_from_iterator([" ".join(WORDS)] * 8 + [f"{c} a{c}{c}" for c in characters] * 2, trainer)
    return core


def with_normalizer(*steps: Any) -> Tokenizer:
    """Byte-level BPE of normalized text."""
    return byte_level(normalizers.Sequence(list(steps)))


BOS, EOS = ("<s>",), ("</s>",)
KINDS: dict[str, Callable[[], Kind]] = {
    "byte-level, no bos": lambda: Kind(byte_level()),
    "byte-level, one word": lambda: Kind(byte_level(regex=False), BOS),
    "sentencepiece, always": lambda: Kind(sentence_pieces("always"), BOS, spaces="marked"),
    "sentencepiece, first": lambda: Kind(sentence_pieces("first"), BOS, spaces="marked"),
    "sentencepiece, never": lambda: Kind(sentence_pieces("never"), BOS, spaces="marked"),
    "sentencepiece, legacy": lambda: Kind(sentence_pieces("legacy"), BOS, spaces="marked"),
    "unigram": lambda: Kind(sentence_pieces("always", unigram=True), (), EOS, spaces="marked"),
    "wordpiece": lambda: Kind(word_pieces(), ("[CLS]",), ("[SEP]",), spaces="dropped"),
    "glm": lambda: Kind(byte_level(), ("[gMASK]", "<sop>")),
    "language before": lambda: Kind(byte_level(), ("en_XX",), EOS),
    "language behind": lambda: Kind(sentence_pieces("always"), (), ("</s>", "en_XX"), spaces="marked"),
    "bos twice": lambda: Kind(byte_level(), ("<s>", "<s>")),
    "bos and eos": lambda: Kind(sentence_pieces("first"), BOS, EOS, spaces="marked"),
    "NFC": lambda: Kind(byte_level(normalizers.NFC()), BOS),
    "NFKC": lambda: Kind(byte_level(normalizers.NFKC()), BOS),
    "lower case": lambda: Kind(
        with_normalizer(normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()),
        BOS,
        spaces="dropped",
    ),
    "stripping tokens": lambda: Kind(stripping(), spaces="dropped"),
}
"""Every kind by its name; each call trains it."""
