"""Documents (plain text, a prompt with its response, or a conversation), and parsing of records into them.

A document may have images and recordings (`media`), in the order in which it shows them. A text or a prompt has a mark
(`media.MARKS`) where each belongs. The messages of a conversation with media hold lists of parts, as chat templates of
Transformers' processors take them, in which a part says the kind alone: ``{"type": "image"}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.data.media import NAMES, Media, MediaReader
from hyper_parallel.errors import DataError, nearest

KEYS = ("text", "prompt", "response", "messages")
SWITCHES = ("weight", "train", "training", "loss", "loss_mask", "loss_weight", "loss_scale")
"""Keys of a message that say whether it bears loss: OpenAI's, axolotl's, and those of other trainers."""
_PARTLY = ("train_detail", "training_detail")
"""Keys that say so of a part of a message."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text whose tokens all contribute to the loss."""

    where: str
    text: str
    media: tuple[Media, ...] = ()

    def content(self) -> str:
        """All of its text, for the training of a tokenizer."""
        return self.text


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt, which does not contribute to the loss, and its response, which does."""

    where: str
    prompt: str
    response: str
    media: tuple[Media, ...] = ()
    """Of the prompt."""

    def content(self) -> str:
        """All of its text, for the training of a tokenizer."""
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the tokenizer's chat template; the assistant's messages contribute to the loss."""

    where: str
    messages: list[dict[str, Any]]
    media: tuple[Media, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    """What the template gets beside the messages: `tools`, `documents`, and the row's `chat_template_kwargs`."""
    silent: frozenset[int] = frozenset()
    """The assistant's messages that bear no loss, by their places."""

    def content(self) -> str:
        """All of its text, for the training of a tokenizer."""
        return "\n".join(_text_of(message.get("content") or "") for message in self.messages)


Document = Text | Answer | Chat


def is_held_out(document: Document, share: float) -> bool:
    """Whether a document belongs to the held-out `share`: a function of its content alone.

    The first 64 bits of the content's BLAKE2b digest, as a number in [0, 1), are compared with the share. So the choice
    depends neither on the order, nor on the other documents, nor on the file's location; copies of a document fall on
    the same side; and a larger share holds out a superset.
    """
    if share <= 0:
        return False
    match document:
        case Text():
            content: list[Any] = ["text", document.text]
        case Answer():
            content = ["answer", document.prompt, document.response]
        case Chat():
            content = ["chat", document.messages, *([document.options] if document.options else [])]
    if document.media:
        content.append([one.identity for one in document.media])
    canonical = json.dumps(content, sort_keys=True, default=str).encode()
    return fraction(canonical) < share


def fraction(data: bytes) -> float:
    """A number in [0, 1) from the BLAKE2b digest of some bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


def from_record(record: Any, where: str, folder: Path | None = None) -> Document | None:
    """The document in one line of JSON or one row of a dataset; None if it has no text.

    `messages` takes precedence over `prompt` and `response`, and these over `text`; media are listed beside them
    (`media.KEYS`) or stand in the messages; beside messages, the chat template gets `tools`, `documents` and
    `chat_template_kwargs`. Other keys are not read. Paths are relative to `folder`. Raises DataError,
    which begins with `where`, for anything else.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"{where}: a {type(record).__name__} stands here; write one JSON object a line, for example "
            '{"text": "..."}'
        )
    given = {str(key): value for key, value in record.items() if value is not None}
    media = MediaReader.of(given, where, folder or Path())
    if "messages" in given:
        messages = _messages(given["messages"], where, media)
        return Chat(
            where, messages, media.all_taken(), template_options(given, where), _silent(messages, where)
        )
    if "prompt" in given or "response" in given:
        for key, other in (("prompt", "response"), ("response", "prompt")):
            if key not in given:
                raise DataError(
                    f"{where}: there is a {other!r} without a {key!r}{_misspelt(key, given)}; give both"
                )
        prompt, response = _string(given, "prompt", where), _string(given, "response", where)
        if not response:
            raise DataError(f"{where}: 'response' is empty, so that nothing bears loss; remove the record")
        return Answer(where, prompt, response, media.taken_by(prompt, "'prompt'"))
    if "text" in given:
        text = _string(given, "text", where)
        return Text(where, text, media.taken_by(text, "'text'")) if text.strip() else None
    hint = _of_others(given) or next((hint for key in KEYS if (hint := _misspelt(key, given))), "")
    keys = ", ".join(repr(key) for key in given) or "none"
    raise DataError(
        f"{where}: none of the keys 'text', 'prompt' and 'response', or 'messages'; its keys are {keys}{hint}"
    )


def _of_others(given: Mapping[str, Any]) -> str:
    """A hint what to write instead of the records of other tools."""
    if "conversations" in given or "conversation" in given:
        return (
            '; rename it to \'messages\', a list of {"role": "user" or "assistant", "content": "..."} (ShareGPT\'s '
            "'from' and 'value' are 'role' and 'content', 'human' is 'user' and 'gpt' is 'assistant')"
        )
    if "instruction" in given or "question" in given:
        return "; write the question as 'prompt' and the answer as 'response'"
    if "content" in given:
        return "; rename 'content' to 'text'"
    return ""


def _misspelt(wanted: str, given: Mapping[str, Any]) -> str:
    """A hint if a given key is similar to the wanted one."""
    return next((f" ({key!r} was given{hint})" for key in given if (hint := nearest(key, [wanted]))), "")


def _string(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is a {type(value).__name__}; it must be a string")
    # JSON can spell half of a surrogate pair, which no UTF-8 tokenizer can take.
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {key!r} holds half a surrogate pair at character {error.start}; write whole characters"
        ) from None
    return value


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _messages(value: Any, where: str, media: MediaReader) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: 'messages' must be a list of "
            '{"role": "user" or "assistant", "content": "..."}, with at least one of them'
        )
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: message {index} is a {type(message).__name__}, not an object")
        kept = {str(key): item for key, item in message.items() if item is not None}
        if "role" not in kept:
            hint = (
                "; ShareGPT's 'from' and 'value' are 'role' and 'content', 'human' is 'user' and 'gpt' is 'assistant'"
                if "from" in kept
                else _misspelt("role", kept)
            )
            raise DataError(f"{where}: message {index} has no 'role'{hint}")
        _string(kept, "role", where)
        # A message that only calls tools has no content.
        if "content" in kept or "tool_calls" not in kept:
            if "content" not in kept:
                raise DataError(f"{where}: message {index} has no 'content'{_misspelt('content', kept)}")
            if isinstance(kept["content"], list):
                kept["content"] = media.parts(kept["content"], f"message {index}")
            else:
                kept["content"] = media.split(_string(kept, "content", where), f"message {index}")
        if kept["role"] == "assistant" and _has_media(kept.get("content")):
            raise DataError(f"{where}: message {index}, an answer, has media; models answer in text alone")
        messages.append(kept)
    if all(message["role"] != "assistant" for message in messages):
        roles = ", ".join(sorted({repr(message["role"]) for message in messages}))
        raise DataError(
            f"{where}: no message has the role 'assistant' (the roles are {roles}), so nothing bears loss"
        )
    return messages


def template_options(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of a record that the chat template gets beside its messages: `tools`, `documents` and the record's
    `chat_template_kwargs`. Raises DataError for one that is of another kind."""
    if record.get("functions"):
        raise DataError(
            f"{where}: 'functions' are not read; write them as 'tools', a list of "
            '{"type": "function", "function": {...}}'
        )
    options: dict[str, Any] = {}
    for key in ("tools", "documents"):
        listed = _json(record.get(key), key, where)
        if listed and not (isinstance(listed, list) and all(isinstance(item, Mapping) for item in listed)):
            raise DataError(
                f"{where}: {key!r} must be a list of objects, which the chat template gets; rename the key if it is "
                "not for the template"
            )
        if listed:
            options[key] = listed
    settings = _json(record.get("chat_template_kwargs"), "chat_template_kwargs", where) or {}
    if not isinstance(settings, Mapping):
        raise DataError(
            f"{where}: 'chat_template_kwargs' is a {type(settings).__name__}; it must be an object"
        )
    for key in settings.keys() & {"tools", "documents", "messages"}:
        raise DataError(f"{where}: 'chat_template_kwargs' has {key!r}; write it as a key of the record")
    return {**options, **{str(key): value for key, value in settings.items()}}


def _json(value: Any, key: str, where: str) -> Any:
    """A value that data sets also write as JSON in a string, since their tables have one type a column."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except ValueError:
        raise DataError(
            f"{where}: {key!r} is a string that is not JSON; write JSON, or rename the key"
        ) from None


def _silent(messages: list[dict[str, Any]], where: str) -> frozenset[int]:
    """The places of the assistant's messages that are to bear no loss."""
    silent = set()
    for index, message in enumerate(messages):
        for key in _PARTLY:
            if key in message:
                raise DataError(
                    f"{where}: message {index} has {key!r}, and an answer bears loss as a whole or not at all; leave "
                    'it out, or switch the answer off with "train": false'
                )
        switches = {key: message[key] for key in SWITCHES if key in message}
        for key, value in switches.items():
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise DataError(
                    f"{where}: message {index} has {key!r} {value!r:.40}, and an answer bears loss or not; write 0 or 1"
                )
            if value and message["role"] != "assistant":
                raise DataError(
                    f"{where}: message {index} has {key!r} {value!r} and the role {message['role']!r}, and answers of "
                    "the role 'assistant' alone can bear loss; leave the key out"
                )
        if len({bool(value) for value in switches.values()}) > 1:
            raise DataError(
                f"{where}: message {index} has {switches}, which contradict each other; keep one of them"
            )
        if message["role"] == "assistant" and not all(switches.values()):
            silent.add(index)
    if all(message["role"] != "assistant" or index in silent for index, message in enumerate(messages)):
        raise DataError(
            f"{where}: every answer is switched off, so that nothing bears loss; remove the record"
        )
    return frozenset(silent)


def _has_media(content: Any) -> bool:
    return isinstance(content, list) and any(part["type"] in NAMES for part in content)
