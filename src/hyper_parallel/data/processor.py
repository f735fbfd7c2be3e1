"""The model's own Transformers processor: documents with images and sound to what the model takes.

The processor makes the batch, as the model expects it: ids with as many placeholders as there are features, and the
tensors of its encoders. What it gives to its tokenizer is looked at on the way, since the loss falls on the answers,
whose place is known in the text before placeholders are written out.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.data import chat
from hyper_parallel.data.chat import Rendered
from hyper_parallel.data.document import Answer, Chat, Document, Text
from hyper_parallel.data.media import MARKS, Kind, Media, load_audio, load_image
from hyper_parallel.data.packing import IGNORED
from hyper_parallel.data.tokenizer import Tokenizer
from hyper_parallel.errors import DataError, one_line
from hyper_parallel.untrusted_files import refuse_irregular_entries

_BEFORE, _AFTER = "\x02before\x03", "\x02after\x03"
"""Texts around a probe for what a template writes in place of media; unlikely in a user's text."""
_OF_MEDIA = ("image", "audio", "video", "boi", "boa")
"""Parts of the names that processors give to placeholders: of media, and of where they begin."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One document after the processor."""

    tokens: int
    """Its positions, without padding."""
    media_tokens: int
    """Positions that stand for media."""
    values: int
    """Floating-point numbers that encoders read: pixels, spectra."""
    predicted: int
    """Positions that bear loss."""
    ends: frozenset[int]
    """The last token of each answer."""


class Processor:
    """A processor with the tokenizer of the run."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, template: str | None) -> None:
        """`template`: the chat template to use in place of the processor's own. Raises DataError."""
        self._processor = load_processor(folder)
        self.folder = folder
        own = self._processor.tokenizer
        # The processor's has the names of its placeholders; another one stands in where the run file asks for it.
        same = own.get_vocab() == tokenizer.transformers.get_vocab()
        self.tokenizer = Tokenizer(own, tokenizer.folder) if same else tokenizer
        if own.pad_token_id is None:
            own.pad_token = own.eos_token
        self._seen = _Seen(self.tokenizer.exact)
        self._processor.tokenizer = self._seen
        if template is not None:
            self._processor.chat_template = template
        elif not getattr(self._processor, "chat_template", None):
            self._processor.chat_template = tokenizer.chat_template

    @cached_property
    def digest(self) -> str:
        """A digest of everything that determines what a document comes to, its media apart."""
        import transformers

        files = [p for p in sorted(self.folder.glob("*processor_config.json")) if p.is_file()]
        parts = [
            transformers.__version__,
            self.tokenizer.digest,
            str(self._processor.chat_template),
            *(path.read_text(encoding="utf-8", errors="replace") for path in files),
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """The ids of placeholders by the names that configs have for them: ``image_token_id``."""
        names = ("image_token_id", "audio_token_id", "video_token_id")
        found = {name: getattr(self._processor, name, None) for name in names}
        return {name: one for name, one in found.items() if isinstance(one, int)}

    def question(self, text: str) -> list[int]:
        """The ids of a user's message without media, up to where its answer begins; without a chat template those of
        the text. Raises DataError."""
        if not self._processor.chat_template:
            return self.tokenizer.encode(text)
        asked = Chat("train.sample.prompt", [_in_parts({"role": "user", "content": text})])
        return self.tokenizer.encode_template([chat.prompt(self._processor, asked)])[0][0]

    def measure(self, document: Document) -> Sample:
        """The size of a document. Raises DataError with its place."""
        batch = self.batch([document])
        labels = batch.pop("labels")[0]
        tokens = int(batch.pop("attention_mask").sum())
        bears = labels != IGNORED
        ends = {
            int(labels[at]) for at in bears.nonzero().flatten() if at + 1 == len(labels) or not bears[at + 1]
        }
        values = sum(one.numel() for one in batch.values() if one.is_floating_point())
        return Sample(tokens, self._seen.media_tokens, values, int(bears.sum()), frozenset(ends))

    def batch(self, documents: Sequence[Document], length: int | None = None) -> dict[str, Tensor]:
        """``input_ids`` and shifted ``labels``, int64 [documents, length], and what else the model takes of them.

        `length`: positions of each row, which must suffice for the longest; left out, of the longest. Raises DataError.
        """
        rendered = [self._rendered(document) for document in documents]
        images = [[load_image(one, d.where) for one in d.media if one.kind == "image"] for d in documents]
        audio = [one for d in documents for one in self._recordings(d)]
        text_settings = {
            "padding": True if length is None else "max_length",
            "padding_side": "right",
            "add_special_tokens": False,
            "return_attention_mask": True,
            **({} if length is None else {"max_length": length}),
        }
        where = ", ".join(document.where for document in documents)
        given: dict[str, Any] = {"images": images if any(images) else None, "audio": audio or None}
        if audio:
            given["audio_kwargs"] = {"sampling_rate": self._rate}
        try:
            outputs = self._processor(
                text=[one.text for one in rendered],
                **{name: one for name, one in given.items() if one is not None},
                text_kwargs=text_settings,
                return_tensors="pt",
            )
        except Exception as error:  # what its parts make of a text or an image of another kind is of any kind
            raise DataError(
                f"{where}: the model's processor does not take this: {one_line(error, 300)}"
            ) from error
        found = {name: one for name, one in outputs.items() if isinstance(one, Tensor)}
        found["labels"] = self._labels(documents, rendered, found["input_ids"])
        return found

    def _recordings(self, document: Document) -> Iterator[Any]:
        for one in document.media:
            if one.kind == "audio":
                part = getattr(self._processor, "feature_extractor", None)
                if part is None:
                    kind = type(self._processor).__name__
                    raise DataError(
                        f"{document.where}: a recording, and {kind} takes none; leave the record out"
                    )
                yield load_audio(one, document.where, self._rate)

    @property
    def _rate(self) -> int:
        """Samples a second of recordings."""
        return int(self._processor.feature_extractor.sampling_rate)

    def _labels(self, documents: Sequence[Document], rendered: Sequence[Rendered], ids: Tensor) -> Tensor:
        """The token after each position where an answer has it, int64 [B, S]; counts those that stand for media."""
        labels = torch.full_like(ids, IGNORED)
        self._seen.media_tokens = 0
        for row, (document, one) in enumerate(zip(documents, rendered, strict=True)):
            aligned = AlignedText.of(one.text, self._seen.texts[row], self._placeholders)
            if aligned is None:
                raise DataError(
                    f"{document.where}: {type(self._processor).__name__} rewrites the text beside its placeholders of "
                    "media, so that the answers cannot be located; such processors are not supported"
                )
            for at, (first, last) in enumerate(self._seen.offsets[row]):
                if first == last:
                    continue
                there = aligned.in_text(first, last)
                if there is None:
                    self._seen.media_tokens += 1
                elif at and any(there[0] < end and there[1] > start for start, end in one.answers):
                    labels[row, at - 1] = ids[row, at]
        return labels

    @cached_property
    def _placeholders(self) -> list[str]:
        """Placeholders of media in a text."""
        own = vars(self._processor).items()
        return [
            value
            for name, value in own
            if name.endswith("_token") and isinstance(value, str) and any(one in name for one in _OF_MEDIA)
        ]

    def _rendered(self, document: Document) -> Rendered:
        match document:
            case Chat():
                return self._conversation(document)
            case Answer():
                prompt, _ = self._with_media(document.prompt, document.media)
                whole = f"{prompt}{document.response}{self._eos}"
                return Rendered(whole, ((len(prompt), len(whole)),), open=False)
            case Text():
                text, shown = self._with_media(document.text, document.media)
                whole = f"{text}{self._eos}"
                bounds = [0, *(edge for span in shown for edge in span), len(whole)]
                answers = tuple((bounds[at], bounds[at + 1]) for at in range(0, len(bounds), 2))
                return Rendered(whole, answers, open=False)

    def _conversation(self, document: Chat) -> Rendered:
        template = self._processor.chat_template
        if not template:
            raise DataError(
                f"{document.where}: 'messages' need a chat template, and the processor in {self.folder} has none; set "
                "data.tokenizer.chat_template to a Jinja file with the template that the model is to answer in"
            )
        as_parts = replace(document, messages=[_in_parts(one) for one in document.messages])
        found = chat.render(self._processor, as_parts)
        if not found.open:
            return found
        *answers, (start, end) = found.answers
        return Rendered(found.text + self._eos, (*answers, (start, end + len(self._eos))), open=False)

    def _with_media(self, text: str, media: Sequence[Media]) -> tuple[str, list[tuple[int, int]]]:
        """A text with the tokens that begin a text and what stands for its media in place of their marks; and where."""
        found = "".join(self.tokenizer.transformers.convert_ids_to_tokens(self.tokenizer.beginning))
        shown = []
        for one in media:
            before, _, text = text.partition(MARKS[one.kind])
            start = len(found) + len(before)
            found += before + self._written[one.kind]
            shown.append((start, len(found)))
        return found + text, shown

    @cached_property
    def _written(self) -> dict[Kind, str]:
        """The text that the chat template writes in place of media, or the processor's placeholder."""
        return {
            kind: self._probed(kind) or str(getattr(self._processor, f"{kind}_token", "")) for kind in MARKS
        }

    def _probed(self, kind: Kind) -> str:
        if not self._processor.chat_template:
            return ""
        parts = [{"type": "text", "text": _BEFORE}, {"type": kind}, {"type": "text", "text": _AFTER}]
        try:
            text = chat.prompt(self._processor, Chat("", [{"role": "user", "content": parts}]))
        except DataError:  # a template of other kinds
            return ""
        return text.partition(_BEFORE)[2].partition(_AFTER)[0].strip() if _AFTER in text else ""

    @property
    def _eos(self) -> str:
        return str(self.tokenizer.transformers.eos_token)


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts, as processors' chat templates take it."""
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


class _Seen:
    """The processor's tokenizer, which keeps what it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []
        self.offsets: list[list[tuple[int, int]]] = []
        """Of the characters of each token; of padding, empty ones."""
        self.media_tokens = 0
        """In the last batch."""

    def __call__(self, text: Any, *args: Any, **settings: Any) -> Any:
        encoded = self._tokenizer(text, *args, **{**settings, "return_offsets_mapping": True})
        offsets = encoded.pop("offset_mapping")
        self.texts = [text] if isinstance(text, str) else list(text)
        self.offsets = offsets.tolist() if isinstance(offsets, Tensor) else list(offsets)
        return encoded

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # while it is copied
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files that name a processor's class, in the order in which Transformers looks into them."""
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def has_processor(folder: Path) -> bool:
    """Whether the folder has the settings of a processor of images or sound."""
    return any((folder / name).is_file() for name in FILES[:2])


def load_processor(folder: Path) -> Any:
    """The processor in a folder, as Transformers' ``save_pretrained`` writes it. Raises DataError.

    Where torchvision is missing, images are processed by Pillow, and a processor of videos is left out.
    """
    try:
        refuse_irregular_entries(folder)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    try:
        found = _load_processor(folder)
    except Exception as error:  # the library's errors are of many kinds
        raise DataError(f"the processor of {folder} cannot be loaded: {one_line(error)}") from error
    if not hasattr(found, "tokenizer"):
        raise DataError(
            f"{folder} has no whole processor, only a {type(found).__name__}; put the files of the model's processor "
            "there (AutoProcessor's save_pretrained writes them)"
        )
    return found


def _load_processor(folder: Path) -> Any:
    import transformers
    from transformers.utils import is_torchvision_available

    kind = getattr(transformers, _class_name(folder) or "", None)
    if is_torchvision_available() or kind is None or "video_processor" not in kind.get_attributes():
        return transformers.AutoProcessor.from_pretrained(str(folder), **_LOCAL)
    loaders: dict[str, Any] = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    parts = [
        _NoVideos() if name == "video_processor" else loaders[name].from_pretrained(str(folder), **_LOCAL)
        for name in kind.get_attributes()
    ]
    settings, _ = kind.get_processor_dict(str(folder), **_LOCAL)
    return _unchecked(kind).from_args_and_dict(parts, settings)


def _unchecked(kind: Any) -> Any:
    """The class without the check that each part is what its name says, and without showing all of its settings."""
    own = {
        "check_argument_for_proper_class": lambda self, name, given: type(given),
        "__repr__": lambda self: kind.__name__,
    }
    return type(kind.__name__, (kind,), own)


class _NoVideos:
    """In place of a processor of videos: there are none."""

    model_input_names: tuple[str, ...] = ()


def _class_name(folder: Path) -> str | None:
    for name in FILES:
        file = folder / name
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8")).get("processor_class")
            if isinstance(found, str):
                return found
    return None


# Positions of a text after a processor has written out its placeholders of media.
#
# A processor replaces each placeholder by as many tokens as the media have features, and leaves the text between as it
# is. So the texts between are found one after the other, the last at the end.


class AlignedText:
    """The parts of a text that a processor has left as they are."""

    def __init__(self, starts: list[int], shifts: list[int], ends: list[int]) -> None:
        self._starts, self._shifts, self._ends = starts, shifts, ends

    @classmethod
    def of(cls, text: str, written: str, placeholders: Sequence[str]) -> AlignedText | None:
        """`written`: what the processor made of `text`. None where that is more than its placeholders written out."""
        pattern = "|".join(re.escape(one) for one in sorted(placeholders, key=len, reverse=True) if one)
        gaps = [found.span() for found in re.finditer(pattern, text)] if pattern else []
        starts, shifts, ends, at = [], [], [], 0
        for number, (gap, stop) in enumerate(
            zip([(0, 0), *gaps], [*(first for first, _ in gaps), len(text)], strict=True)
        ):
            between, first = text[gap[1] : stop], gap[1]
            whole = text[gap[0] : stop]
            # Adjacent placeholders differ by their number alone.
            if written.startswith(whole, at) and (between or not number or written[at:] == whole):
                between, first, found = whole, gap[0], at  # it was not written out
            elif number == 0:
                return None
            else:
                found = written.find(between, at)
            if number == len(gaps):
                found = len(written) - len(between)
            if found < at or not written.startswith(between, found):
                return None
            starts.append(found)
            shifts.append(found - first)
            at = found + len(between)
            ends.append(at)
        return cls(starts, shifts, ends)

    def in_text(self, first: int, last: int) -> tuple[int, int] | None:
        """Where the written characters [first, last) are in the text; None where media stand."""
        part = bisect_right(self._starts, first) - 1
        while part > 0 and self._ends[part] <= first:  # parts may be empty
            part -= 1
        if part < 0 or first >= self._ends[part]:
            return None
        shift = self._shifts[part]
        return first - shift, min(last, self._ends[part]) - shift
