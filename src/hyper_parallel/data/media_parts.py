"""Places of media in a record: marks in its texts, and parts of its messages.

    {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", ...}]}, ...]}
    {"messages": [{"role": "user", "content": "<image>?"}, ...], "images": ["a.png"]}
    {"prompt": "<image>?", "response": "A cat.", "images": ["a.png"]}

The first is the form of Transformers' chat templates. Where a record lists its media, the next of them belongs to each
mark, or to each part that names none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.data.media import KEYS, MARKS, NAMES, Kind, Media, media_of
from hyper_parallel.errors import DataError

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
        """That of a record. Raises DataError for lists of anything but media."""
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
