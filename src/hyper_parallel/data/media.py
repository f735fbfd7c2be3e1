"""Images and recordings: how a record names them, and how they are read.

A path is relative to the folder of the record's file. Nothing is fetched from a network.
"""

from __future__ import annotations

import base64
import hashlib
import io
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hyper_parallel.errors import DataError
from hyper_parallel.untrusted import open_regular

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
        """What tells it from others, wherever the data lie."""
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
        raise DataError(f"{where}: {_shown(media)} cannot be read as an image: {_line(error)}") from error


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
        raise DataError(f"{where}: {_shown(media)} cannot be read as a recording: {_line(error)}") from error
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


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
