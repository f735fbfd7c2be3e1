"""The tokenizer: byte-level BPE trained on the training text, or loaded from a folder.

Token ids are those of the tokenizer's own call on a whole text, for every kind of tokenizer: a text that is cut before
it is encoded gets other ids wherever a tokenizer looks at what is before (the space that SentencePiece puts first).
Ranges that bear loss are given in characters, and each token has the range of the characters that it holds.

Byte-level BPE (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2): the
alphabet is the 256 bytes, so that every text has tokens and no token is unknown.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.config.data import no_tokenizer
from hyper_parallel.data import long_text
from hyper_parallel.data.cache import ArrayWriter, read_array, read_or_build
from hyper_parallel.data.chat import DEFAULT_TEMPLATE
from hyper_parallel.data.document import fraction
from hyper_parallel.errors import DataError, one_line
from hyper_parallel.untrusted_files import refuse_irregular_entries

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SMALLEST = 256 + 2
"""The smallest vocabulary: the 256 bytes, end-of-text and padding."""

_FORMAT = 1
# Enough that a larger sample hardly changes the merges, and trained in about two seconds on two cores.
_SAMPLE_CHARACTERS = 16 * 2**20
_CHUNK = 2**14


Range = tuple[int, int]
"""The characters [start, end) of a text."""


class Encoding(NamedTuple):
    """The tokens of one text."""

    ids: list[int]
    ranges: list[Range]
    """The characters that each token holds; of no meaning for tokens that are added."""
    prefix: int
    """The number of tokens that the tokenizer adds before the text."""
    suffix: int
    """The number of tokens that it adds behind the text."""


class Tokenizer:
    """Wrapper of a Transformers tokenizer for the data pipeline."""

    def __init__(self, transformers_tokenizer: Any, folder: Path | None = None) -> None:
        """Takes a fast (Rust) Transformers tokenizer, and the folder that it was read from.

        Raises DataError when it has no end-of-text token.
        """
        self.transformers = transformers_tokenizer
        """The PreTrainedTokenizerFast itself."""
        self.folder = folder
        """The folder with this tokenizer's files; None if it came from no folder, or was changed since."""
        if self.transformers.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-text token, which ends every document; set 'eos_token' in its "
                "tokenizer_config.json"
            )

    @property
    def eos(self) -> int:
        """The id of the end-of-text token."""
        return int(self.transformers.eos_token_id)

    @property
    def pad(self) -> int:
        """The id of padding: the padding token's, or the end-of-text token's if there is none."""
        pad = self.transformers.pad_token_id
        return self.eos if pad is None else int(pad)

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template; None if there is none, or several without a default."""
        own = self.transformers.chat_template
        return own.get("default") if isinstance(own, Mapping) else own

    @cached_property
    def marks(self) -> frozenset[int]:
        """The ids of added special tokens, such as those that end a turn."""
        return frozenset(map(int, self.transformers.added_tokens_decoder))

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the number of rows that a model's embedding needs."""
        return 1 + max(map(int, self.transformers.get_vocab().values()))

    @property
    def ids_of_texts(self) -> list[Any]:
        """Everything that determines the ids of a plain text."""
        return [self.exact.backend_tokenizer.to_str(), self.eos, bool(self.exact.split_special_tokens)]

    @cached_property
    def digest(self) -> str:
        """A digest of everything that determines the tokens of a document."""
        special = {name: str(token) for name, token in self.transformers.special_tokens_map.items()}
        parts = [*self.ids_of_texts, self.transformers.chat_template, special]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @property
    def beginning(self) -> list[int]:
        """The ids that the tokenizer itself puts before a text."""
        return self._added[0]

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of the tokenizer's own call on a text: what it adds before and behind included. `special_tokens`:
        whether names of special tokens in it are these tokens."""
        if special_tokens:
            return self.encode_texts([text])[0]
        before, behind = self._added
        return [*before, *self.encode_raw([text])[0], *behind]

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """As `encode`, of each text; long ones in windows where that gives the same ids."""
        backend = self.exact.backend_tokenizer
        long = [
            at
            for at, text in enumerate(texts)
            if len(text) > long_text.WINDOW
            and self._has_windows
            and long_text.is_provable_text(backend, text)
        ]
        short = [text for at, text in enumerate(texts) if at not in long]
        long_text.check_memory(short)
        encoded = iter(self._called(short)["input_ids"] if short else [])
        return [self._by_windows(text) if at in long else next(encoded) for at, text in enumerate(texts)]

    def encode_ranges(self, texts: list[str]) -> list[Encoding]:
        """As `encode`, of each text, with the characters that each token holds."""
        if not texts:
            return []
        called = self._called(texts, return_offsets_mapping=True, return_special_tokens_mask=True)
        columns = (called[name] for name in ("input_ids", "offset_mapping", "special_tokens_mask"))
        encodings = []
        for text, ids, ranges, added in zip(texts, *columns, strict=True):
            ranges = self._refined(text, ids, ranges)
            if all(added):  # of a text without a token
                prefix = len(self.beginning)
                encodings.append(Encoding(ids, ranges, prefix, len(ids) - prefix))
            else:
                encodings.append(Encoding(ids, ranges, added.index(0), added[::-1].index(0)))
        return encodings

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of some ids; special tokens are left out, or have their names (`special`)."""
        return str(self.transformers.decode(list(ids), skip_special_tokens=not special))

    def encode_raw(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text without what the tokenizer adds, the names of special tokens as ordinary text."""
        settings = {"add_special_tokens": False, "split_special_tokens": True}
        return self._called(texts, **settings)["input_ids"] if texts else []

    def encode_template(self, texts: list[str]) -> list[tuple[list[int], list[Range]]]:
        """The ids of each rendered template, as `apply_chat_template` has them, and each token's character range."""
        if not texts:
            return []
        called = self._called(texts, add_special_tokens=False, return_offsets_mapping=True)
        columns = called["input_ids"], called["offset_mapping"]
        return [
            (ids, self._refined(text, ids, ranges)) for text, ids, ranges in zip(texts, *columns, strict=True)
        ]

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which AutoTokenizer loads."""
        self.transformers.save_pretrained(str(folder))

    @cached_property
    def exact(self) -> Any:
        """A copy of the Transformers tokenizer whose character ranges are complete, as it was at the first use.

        The ids are the same. Byte-level post-processors leave spaces out of a token's range (`trim_offsets`), so that
        the token of a space that begins an answer would hold none of it. The user's object stays as it is: a call
        changes its truncation and padding. Raises DataError for a tokenizer without a Rust part, which cannot say what
        characters a token holds.
        """
        if not self.transformers.is_fast:
            raise DataError(
                f"{type(self.transformers).__name__} is not a fast tokenizer, and does not say which characters a "
                "token holds; convert it to tokenizer.json"
            )
        exact = copy.deepcopy(self.transformers)
        # Of long texts, which are cut into rows later, the library would warn.
        exact.model_max_length = sys.maxsize
        backend = exact.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        if backend.post_processor is not None:
            backend.post_processor = _untrimmed(backend.post_processor)
        return exact

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before a text and behind it."""
        # The name of a special token is the one text that every tokenizer has a token for.
        ids, _, prefix, suffix = self.encode_ranges([str(self.transformers.eos_token)])[0]
        return ids[:prefix], ids[len(ids) - suffix :]

    @cached_property
    def _has_windows(self) -> bool:
        # A class with its own call does more than what tokenizer.json says.
        called = type(self.exact)._encode_plus.__module__ == "transformers.tokenization_utils_tokenizers"
        return called and long_text.provable(self.exact.backend_tokenizer)

    def _by_windows(self, text: str) -> list[int]:
        def encode(window: str) -> Any:
            return self._called([window], add_special_tokens=False, return_offsets_mapping=True).encodings[0]

        before, behind = self._added
        return before + long_text.ids_by_windows(encode, text) + behind

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        """The bytes by the ids of the tokens that stand for them where a character has no token (`<0x0A>`)."""
        vocabulary = self.exact.get_vocab()
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        return {vocabulary[name]: byte for name, byte in names.items() if name in vocabulary}

    def _refined(self, text: str, ids: list[int], ranges: list[Range]) -> list[Range]:
        """The ranges with the character of each byte, where Unigram gives all bytes of a run of unknown characters the
        range of the run."""
        byte_of = self._byte_tokens
        if byte_of.keys().isdisjoint(ids):
            return ranges
        refined: list[Range] = []
        for (first, last), group in itertools.groupby(range(len(ids)), lambda at: ranges[at]):
            run = list(group)
            data = bytes(byte_of[ids[at]] for at in run if ids[at] in byte_of)
            if last - first > 1 and len(data) == len(run) and data == text[first:last].encode():
                places = [at for at in range(first, last) for _ in text[at].encode()]
                refined += [(at, at + 1) for at in places]
            else:
                refined += [(first, last)] * len(run)
        return refined

    def _called(self, texts: list[str], **settings: Any) -> Any:
        return self.exact(texts, return_attention_mask=False, return_token_type_ids=False, **settings)


def _untrimmed(post_processor: Any) -> Any:
    """A post-processor that gives tokens the whole range of their characters."""
    rust = _rust()
    state = json.loads(rust.Tokenizer(rust.models.BPE()).to_str())
    text = post_processor.__getstate__().decode()
    state["post_processor"] = json.loads(
        text, object_hook=lambda part: {**part, "trim_offsets": False} if "trim_offsets" in part else part
    )
    return rust.Tokenizer.from_str(json.dumps(state)).post_processor


def load(folder: str, key: str = "data.tokenizer.path") -> Tokenizer:
    """The tokenizer in a folder with `tokenizer.json`, which the run file names under `key`.

    Raises DataError if it is missing or invalid.
    """
    path = Path(folder).expanduser()
    if not (path / "tokenizer.json").is_file():
        raise DataError(no_tokenizer(path, key))
    try:
        refuse_irregular_entries(path)
    except OSError as error:
        raise DataError(f"{key}: {error.filename} cannot be read: {error.strerror}") from error
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (
        Exception
    ) as error:  # the library's errors are of many kinds, those of its Rust part plain Exceptions
        raise DataError(f"{key}: the tokenizer of {path} cannot be loaded: {one_line(error)}") from error
    if not found.is_fast:
        raise DataError(f"{key}: {path} is not a fast tokenizer; convert it to tokenizer.json")
    return Tokenizer(found, path)


def train(texts: Iterable[str], size: int, vocab_size: int) -> str:
    """The `tokenizer.json` of a byte-level BPE tokenizer of at most `vocab_size` tokens, trained on a sample.

    `size`: approximate bytes of `texts`; of more than 16 MiB a sample is taken. The same texts give the same bytes.
    Raises DataError for a `vocab_size` below 258, which is the bytes and two special tokens.
    """
    if vocab_size < SMALLEST:
        raise DataError(
            f"data.tokenizer.vocab_size is {vocab_size}, but 256 bytes and 2 special tokens need {SMALLEST}"
        )
    rust = _rust()
    tokenizer = rust.Tokenizer(rust.models.BPE())
    tokenizer.pre_tokenizer = rust.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = rust.decoders.ByteLevel()
    trainer = rust.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(rust.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts, size), trainer)
    return str(tokenizer.to_str())


def trained(folder: Path, key: str, texts: Iterable[str], size: int, vocab_size: int) -> Tokenizer:
    """The tokenizer that `train` builds from `texts`, cached in `folder` under `key`."""
    key = f"tokenizer-{_FORMAT}-{vocab_size}-{key}"
    path = folder / f"{key}.array"

    def read() -> str | None:
        found = read_array(path)
        return None if found is None else found[0].tobytes().decode(errors="replace")

    def build() -> None:
        text = train(texts, size, vocab_size)
        writer = ArrayWriter(path, "|u1")
        try:
            writer.append(np.frombuffer(text.encode(), np.uint8))
            writer.commit()
        finally:
            writer.discard()

    text = read_or_build(folder, key, read, build)
    try:
        return _transformers_tokenizer(text)
    except Exception as error:  # the library's Rust part raises plain ones
        raise DataError(f"{path} holds no tokenizer; delete it, and it is made again") from error


def _transformers_tokenizer(text: str) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_rust().Tokenizer.from_str(text),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = DEFAULT_TEMPLATE
    return Tokenizer(tokenizer)


def _sample(texts: Iterable[str], size: int) -> Iterator[str]:
    """All texts, or the chunks whose digests fall below the share that fits the bound."""
    share = _SAMPLE_CHARACTERS / max(size, 1)
    taken = 0
    for text in texts:
        for start in range(0, len(text), _CHUNK):
            chunk = text[start : start + _CHUNK]
            if share >= 1 or fraction(chunk.encode()) < share:
                yield chunk
                taken += len(chunk)
            if taken > 2 * _SAMPLE_CHARACTERS:  # a text that repeats itself can defeat the share
                return


def _rust() -> Any:
    """The tokenizers package; Transformers has already imported most of it."""
    import tokenizers

    return tokenizers


def character_tokenizer(characters: str) -> Any:
    """Transformers' fast tokenizer: end of text is 0, padding 1, and then the characters in their order.

    Raises DataError for a character that comes twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    twice = next((one for place, one in enumerate(characters) if one in characters[:place]), None)
    if twice is not None or not characters:
        what = "is empty" if twice is None else f"has {twice!r} twice"
        raise DataError(f"characters: the list {what}; write each character of the task once")
    vocabulary = {token: number for number, token in enumerate([END_OF_TEXT, PAD, *characters])}
    # Without a token for what is unknown, which would stand for any character; encoding one raises.
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END_OF_TEXT, pad_token=PAD)


def encode_characters(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text. Raises DataError for a character that the tokenizer does not have."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the library raises no narrower one
        raise DataError(
            f"the tokenizer has no token for a character of {text!r}; add it to 'characters'"
        ) from error
    return ids
