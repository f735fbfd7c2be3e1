"""Images and recordings: how a record names them, where its texts and messages show them, and how they are read.

A path is relative to the folder of the record's file. Nothing is fetched from a network.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hyper_parallel.errors import DataError, one_line
from hyper_parallel.untrusted_files import open_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["image", "audio"]

KEYS: Mapping[str, Kind] = {"images": "image", "image": "image", "audios": "audio", "audio": "audio"}
"""Keys of a record that list its media, and what they list."""
MARKS: Mapping[Kind, str] = {"image": "<image>", "audio": "<audio>"}
"""What stands in a text where the next of the listed media belongs."""
NAMES: Mapping[Kind, str] = {"image": "an image", "audio": "a recording"}


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a recording of one record."""

    kind: Kind
    name: str
    """As the record names it, or the digest of `data`."""
    path: Path | None
    """Where it lies; None for `data`."""
    data: bytes | None = field(default=None, repr=False)
    """The encoded file, where the record itself holds it."""

    @property
    def identity(self) -> list[str]:
        """Facts that distinguish it from others, wherever the data lie."""
        return [self.kind, self.name]


def media_of(value: Any, kind: Kind, where: str, folder: Path) -> Media:
    """The media that a record's `value` names: a path, or a mapping with `bytes` or `path` as `datasets` keeps it.

    Raises DataError, which begins with `where`.
    """
    if isinstance(value, Mapping):
        data = value.get("bytes")
        if isinstance(data, bytes):
            return Media(kind, hashlib.blake2b(data, digest_size=16).hexdigest(), None, data)
        value = next((value[key] for key in ("path", "url") if value.get(key) is not None), value)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where}: {NAMES[kind]} is given as a {type(value).__name__}; give the path of a file"
        )
    if value.startswith(("http://", "https://", "data:")):
        what = "an address, and nothing is fetched" if value.startswith("http") else "written out as text"
        raise DataError(f"{where}: {NAMES[kind]} is {what} ({value[:60]}); save it, and give the file's path")
    path = Path(value.removeprefix("file://")).expanduser()
    return Media(kind, value, path if path.is_absolute() else folder / path)


def load_image(media: Media, where: str) -> Any:
    """The image as Pillow's, in RGB and upright. Raises DataError with `where` and the path."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError(f"{where}: images are read by Pillow; pip install 'hyper-parallel[images]'") from None
    data = _encoded(media, where)
    try:
        return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    except Exception as error:  # damaged files raise what their format's reader happens to run into
        raise DataError(f"{where}: {_shown(media)} cannot be read as an image: {one_line(error)}") from error


def load_audio(media: Media, where: str, rate: int) -> NDArray[np.float32]:
    """The recording as samples in [-1, 1], of one channel, `rate` a second. Raises DataError with `where` and the path.

    Uncompressed WAV of this rate needs no package; all else is read and resampled as Transformers does.
    """
    data = _encoded(media, where)
    try:
        plain = _wav(data, rate)
        if plain is not None:
            return plain
        from transformers.audio_utils import load_audio as load

        found: NDArray[np.float32] = load(base64.b64encode(data).decode(), sampling_rate=rate)
    except ImportError:
        raise DataError(
            f"{where}: {_shown(media)} is no WAV file of {rate} samples a second, and other recordings need more "
            "packages; pip install 'hyper-parallel[audio]'"
        ) from None
    except Exception as error:  # as for images
        raise DataError(
            f"{where}: {_shown(media)} cannot be read as a recording: {one_line(error)}"
        ) from error
    return found


def _encoded(media: Media, where: str) -> bytes:
    if media.data is not None:
        return media.data
    assert media.path is not None, "media have a path or data"
    try:
        with open_regular(media.path) as file:
            return file.readall()
    except OSError as error:
        raise DataError(unreadable(media, where, error)) from error


def unreadable(media: Media, where: str, error: OSError) -> str:
    """Error text for a file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return (
            f"{where}: {_shown(media)} does not exist; paths are relative to the folder of the record's file"
        )
    return f"{where}: {_shown(media)} cannot be read: {error.strerror}"


def _wav(data: bytes, rate: int) -> NDArray[np.float32] | None:
    """Samples of uncompressed WAV data of this rate; None for anything else."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    # The command line reads rows' names before anything heavy is imported.
    import numpy as np

    try:
        with wave.open(io.BytesIO(data)) as file:
            if file.getframerate() != rate or file.getsampwidth() not in (2, 4):
                return None
            dtype = np.dtype(f"<i{file.getsampwidth()}")
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype).reshape(
                -1, file.getnchannels()
            )
    except (wave.Error, EOFError):  # floating-point samples, for one
        return None
    scaled = samples.astype(np.float32) / -np.float32(np.iinfo(dtype).min)
    return np.ascontiguousarray(scaled.mean(axis=1, dtype=np.float32))


def _shown(media: Media) -> str:
    return str(media.path) if media.path is not None else f"the {media.kind} that the record holds"


# Places of media in a record: marks in its texts, and parts of its messages.
#
#     {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", ...}]}, ...]}
#     {"messages": [{"role": "user", "content": "<image>?"}, ...], "images": ["a.png"]}
#     {"prompt": "<image>?", "response": "A cat.", "images": ["a.png"]}
#
# The first is the form of Transformers' chat templates. Where a record lists its media, the next of them belongs to
# each mark, or to each part that names none.

_UNREAD = {
    "video": "videos",
    "videos": "videos",
    "video_url": "videos",
    "input_audio": "recordings in the record",
}
_SOURCES = ("path", "url")


@dataclass
class MediaReader:
    """The media of one record, taken in the order in which it shows them."""

    where: str
    folder: Path
    listed: dict[Kind, list[Media]]
    """Those that the record lists, by kind; a kind that it does not list has no marks in texts."""
    taken: list[Media] = field(default_factory=list)
    """So far."""

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str, folder: Path) -> MediaReader:
        """The media of a record. Raises DataError for lists of anything but media."""
        listed: dict[Kind, list[Media]] = {}
        for key, value in record.items():
            if key in ("video", "videos") and value:
                raise DataError(f"{where}: {key!r}: videos cannot be trained on yet; leave the record out")
            if key not in KEYS:
                continue
            kind = KEYS[key]
            if kind in listed:
                raise DataError(f"{where}: {key!r} and another key list its {kind}s; give one list")
            values = value if isinstance(value, list) else [value]
            listed[kind] = [media_of(one, kind, where, folder) for one in values]
        return cls(where, folder, listed)

    def split(self, text: str, place: str) -> str | list[dict[str, Any]]:
        """A text with marks as parts; the text itself where the record lists no media."""
        if not self.listed:
            return text
        parts: list[dict[str, Any]] = []
        for piece in re.split(f"({'|'.join(re.escape(MARKS[kind]) for kind in self.listed)})", text):
            kind = next((kind for kind in self.listed if piece == MARKS[kind]), None)
            if kind is not None:
                self._next(kind, f"{place} has one more {MARKS[kind]}")
                parts.append({"type": kind})
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def parts(self, content: list[Any], place: str) -> list[dict[str, Any]]:
        """The parts of a message, without where media lie."""
        return [self._part(part, f"{place}, part {number}") for number, part in enumerate(content)]

    def taken_by(self, text: str, place: str) -> tuple[Media, ...]:
        """The media of a text with a mark for each."""
        self.split(text, place)
        return self.all_taken()

    def all_taken(self) -> tuple[Media, ...]:
        """All media in their order. Raises DataError where some are listed and not shown."""
        for kind, left in self.listed.items():
            if left:
                shown = sum(one.kind == kind for one in self.taken)
                raise DataError(
                    f"{self.where}: the text shows {shown} {kind}{'s' * (shown != 1)}, and {shown + len(left)} are "
                    f"given; write {MARKS[kind]} where each belongs"
                )
        return tuple(self.taken)

    def _part(self, part: Any, place: str) -> dict[str, Any]:
        if not isinstance(part, Mapping):
            raise DataError(f"{self.where}: {place} is a {type(part).__name__}, not an object with a 'type'")
        # A dataset's table has every key in every part.
        part = {str(key): value for key, value in part.items() if value is not None}
        kind = part.get("type")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise DataError(f"{self.where}: {place} has no 'text' that is a string")
            return {"type": "text", "text": part["text"]}
        if kind == "image_url":
            kind, part = "image", {"image": part.get("image_url")}
        if kind not in NAMES:
            unread = _UNREAD.get(str(kind))
            reason = f"{unread} cannot be trained on yet" if unread else f"its 'type' is {kind!r}"
            raise DataError(f"{self.where}: {place}: {reason}; the types are text, {', '.join(NAMES)}")
        given = next((part[key] for key in (kind, *_SOURCES) if key in part), None)
        if given is None:
            self._next(kind, f"{place} is one more {kind}")
        else:
            self.taken.append(media_of(given, kind, self.where, self.folder))
        return {"type": kind}

    def _next(self, kind: Kind, what: str) -> None:
        left = self.listed.get(kind)
        if not left:
            given = sum(one.kind == kind for one in self.taken) if kind in self.listed else 0
            raise DataError(
                f"{self.where}: {what} than the {given} {kind}{'s' * (given != 1)} that the record has; list as many "
                "as the text shows"
            )
        self.taken.append(left.pop(0))
