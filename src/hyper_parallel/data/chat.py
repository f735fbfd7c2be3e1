"""Chat templates: conversations to text, with the assistant's answers marked.

If a template marks answers with `{% generation %}`, its marks are used. For any other template, an answer is the
difference to the rendering of the conversation before it, up to the generation prompt:

    start = len(render(messages[:i], add_generation_prompt=True))
    end   = len(render(messages[:i + 1]))

where both are prefixes of the whole rendering. They are not where a template writes earlier turns otherwise (it drops
earlier reasoning, or moves tools to the last question). Then the answer is found in its place: with a probe in place of
message i and all others as they are,

    render(messages) = LEFT answer RIGHT,  where  render(messages with the probe) = LEFT probe RIGHT

A template for which neither holds is refused, because its loss would fall on the wrong tokens. If a template has no
generation prompt, or the assistant speaks first, the answer starts where the template puts the probe.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.data.document import Chat
from hyper_parallel.errors import DataError, nearest, one_line

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|assistant|>\\n' }}{% endif %}"
)
"""The built-in template: each message is `<|role|>`, a line break, its content and the end-of-text token, which any
tokenizer has and at which generation stops.
"""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Stands for a message to find the text that a template puts around it; unlikely in a user's text. Digits, since filters
# such as `upper`, `trim` and `tojson` leave them as they are.
_PROBE = "58209974304691073562"
_MEND = (
    "use a chat template that marks answers with {% generation %}, or write one conversation for each answer"
)

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """The characters [start, end) of each answer, its end-of-turn token included."""
    open: bool
    """Whether the last answer ends the conversation and the template adds no end-of-turn token."""


def render(owner: Any, chat: Chat) -> Rendered:
    """A conversation rendered by a tokenizer or a processor, with the characters of the answers that bear loss.

    Raises DataError if the template refuses the messages or shows less than what the row says, or if an answer cannot
    be separated from the rest.
    """
    template = _template(owner, chat)
    _check_options(owner, chat, template)
    chat = _in_form(owner, chat)
    rendered = _marked(owner, chat, template) if _GENERATION.search(template) else _located(owner, chat)
    _check_shown(owner, chat, rendered.text)
    return rendered


def prompt(owner: Any, chat: Chat) -> str:
    """A conversation rendered up to its answer: to the generation prompt, or, where the assistant has begun to answer,
    to the end of that message. Raises DataError for options that the template does not read."""
    tokenizer: Any = getattr(owner, "tokenizer", owner)
    if chat.options:
        template = _guarded(chat, lambda: tokenizer.get_chat_template(tools=chat.options.get("tools")))
        _check_options(owner, chat, template)
    begun = bool(chat.messages) and chat.messages[-1].get("role") == "assistant"
    return _text(
        owner, chat, chat.messages, **{"continue_final_message" if begun else "add_generation_prompt": True}
    )


def conversation(owner: Any, chat: Chat) -> str:
    """A whole conversation rendered, without a generation prompt."""
    return _text(owner, chat, chat.messages)


def _marked(owner: Any, chat: Chat, template: str) -> Rendered:
    """By the marks of the template, as Transformers reads them.

    `apply_chat_template` gives a mask of tokens alone, and drops the rest of the answers where one begins with a
    character that no token holds; so what it calls is called here.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    special = getattr(owner, "tokenizer", owner).special_tokens_map
    [text], [answers] = _guarded(
        chat,
        lambda: render_jinja_template(
            [chat.messages],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**special, **chat.options},
        ),
    )
    speaking = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if chat.silent and len(answers) != len(speaking):
        raise DataError(
            f"{chat.where}: message {min(chat.silent)} is to bear no loss, and the chat template marks {len(answers)} "
            f"answers in {len(speaking)}; mark each answer once with {{% generation %}}"
        )
    if chat.silent:
        answers = [span for index, span in zip(speaking, answers, strict=True) if index not in chat.silent]
    if not answers:
        raise DataError(
            f"{chat.where}: the chat template marks no token of this conversation as an answer; {_MEND}"
        )
    return Rendered(text, tuple((int(start), int(end)) for start, end in answers), open=False)


def _located(owner: Any, chat: Chat) -> Rendered:
    """By renderings of parts of the conversation, for a template without marks."""
    whole = _text(owner, chat, chat.messages)
    answers: list[tuple[int, int]] = []
    is_open = False
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant" and index not in chat.silent:
            turn = _Turn(owner, chat, index, whole)
            start = turn.start()
            answers.append((start, turn.end(start)))
            is_open = turn.bare and index + 1 == len(chat.messages)
    return Rendered(whole, tuple(answers), is_open)


class _Turn:
    """The place of an answer, message `index`, in a whole rendering."""

    def __init__(self, owner: Any, chat: Chat, index: int, whole: str) -> None:
        self.owner, self.chat, self.index, self.whole = owner, chat, index, whole
        self.before = chat.messages[:index]
        # Without what else the message has: a template may show its tool calls in place of the content.
        self.probe = _with_content({"role": "assistant"}, chat.messages[index], _PROBE)
        self.header, shown, self.trailer = self._around([])
        if not shown:
            raise DataError(
                f"{chat.where}: the chat template does not show message {index} as it is written; {_MEND}"
            )
        self.bare = not self.trailer.strip()
        """Whether the template ends an answer with white space alone."""

    def start(self) -> int:
        """After the generation prompt, or after the header if there is none."""
        prompted = self.header
        has_prompt = False
        if self.before:
            prompted = self._text(self.before, add_generation_prompt=True)
            has_prompt = prompted != self._text(self.before)
        opening = prompted if has_prompt else self.header
        if self.whole.startswith(opening):
            return len(opening)
        left, _ = self._in_place()
        # The header may go on behind the generation prompt, as with an empty block of reasoning in the last turn.
        constant = self.header.partition(prompted)[2] if has_prompt else ""
        start = len(left.removesuffix(constant))
        if self.whole[:start] != left[:start]:
            raise self._not_found()
        return start

    def end(self, start: int) -> int:
        """After the end-of-turn token. White space behind it belongs to no answer; where a template has no such token,
        the white space is what ends the turn."""
        after = self._text(self.chat.messages[: self.index + 1])
        if self.whole.startswith(after) and len(after) >= start:
            return len(after) if self.bare else len(after.rstrip())
        _, right = self._in_place()
        content_end = len(self.whole) - len(right)
        if not self.whole.endswith(right) or content_end < start:
            raise self._not_found()
        if right.startswith(self.trailer):
            return content_end + (len(self.trailer) if self.bare else len(self.trailer.rstrip()))
        # The last turn may end otherwise than earlier ones (`<|return|>`), but each with one special token.
        added = getattr(self.owner, "tokenizer", self.owner).added_tokens_decoder.values()
        names = sorted((re.escape(str(token)) for token in added), key=len, reverse=True)
        ending = re.match(rf"\s*(?:{'|'.join(names)})", right) if names else None
        if ending is None:
            raise self._not_found()
        return content_end + ending.end()

    def _in_place(self) -> tuple[str, str]:
        """The text around the probe with all other messages as they are."""
        try:
            left, shown, right = self._around(self.chat.messages[self.index + 1 :])
        except DataError as error:  # as where results of tools have to follow calls
            raise self._not_found() from error
        if not shown:
            raise self._not_found()
        return left, right

    def _around(self, rest: list[Message]) -> tuple[str, str, str]:
        return self._text([*self.before, self.probe, *rest]).partition(_PROBE)

    def _text(self, messages: list[Message], **options: Any) -> str:
        return _text(self.owner, self.chat, messages, **options)

    def _not_found(self) -> DataError:
        return DataError(
            f"{self.chat.where}: the chat template renders the conversation around message {self.index} otherwise once "
            f"it has another answer there, so that the answer cannot be located; {_MEND}"
        )


def _check_options(owner: Any, chat: Chat, template: str) -> None:
    """Raise DataError for what the row gives to the template and the template does not read."""
    taken = inspect.signature(owner.apply_chat_template).parameters.keys() - {"tools", "documents"}
    for name in chat.options:
        if name in taken:
            raise DataError(
                f"{chat.where}: 'chat_template_kwargs' has {name!r}, which is not for the template but for "
                "apply_chat_template; leave it out"
            )
        if not re.search(rf"\b{re.escape(name)}\b", template):
            hint = nearest(name, set(re.findall(r"\w+", template)))
            raise DataError(
                f"{chat.where}: the chat template does not read {name!r}, which would be ignored{hint}; leave it out, "
                "or name a template that reads it with data.tokenizer.chat_template"
            )


def _check_shown(owner: Any, chat: Chat, whole: str) -> None:
    """Raise DataError for a message to the assistant that the template leaves out, as some do with unknown roles."""
    for index, message in enumerate(chat.messages):
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        text = next((part for part in parts if part.strip()), None)
        if message["role"] == "assistant" or text is None or text.strip() in whole:
            continue
        probe = _with_content(message, message, _PROBE)
        try:
            shown = _text(owner, chat, [*chat.messages[:index], probe, *chat.messages[index + 1 :]])
        except DataError:  # the template looks at the content, so it is not left out
            continue
        if _PROBE not in shown:
            raise DataError(
                f"{chat.where}: the chat template does not show message {index}, of the role {message['role']!r}; "
                "give it a role that the template has, or leave it out"
            )


def _in_form(owner: Any, chat: Chat) -> Chat:
    """The conversation with contents as the template takes them: parts of text alone joined if it takes no parts."""
    listed = [message for message in chat.messages if isinstance(message.get("content"), list)]
    if not listed or chat.media:
        return chat
    probe = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
    try:
        shown = _text(owner, replace(chat, options={}), probe)
    except DataError:
        shown = ""
    # A template of strings alone fails, or writes the list in Python's notation.
    if _PROBE in shown and f"'{_PROBE}'" not in shown and f'"{_PROBE}"' not in shown:
        return chat
    joined = [
        {**message, "content": "".join(part.get("text", "") for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in chat.messages
    ]
    return replace(chat, messages=joined)


def _with_content(message: Message, like: Mapping[str, Any], text: str) -> Message:
    """A message with a text as its content, in parts if that of another is."""
    in_parts = isinstance(like.get("content"), list)
    return {**message, "content": [{"type": "text", "text": text}] if in_parts else text}


def _template(owner: Any, chat: Chat) -> str:
    """The source of the template that renders a conversation."""
    choose = getattr(owner, "get_chat_template", None)
    if choose is not None:
        return str(_guarded(chat, lambda: choose(tools=chat.options.get("tools"))))
    template = owner.chat_template  # a processor's
    return str(template["default"] if isinstance(template, dict) else template)


def _text(owner: Any, chat: Chat, messages: Sequence[Message], **ends: bool) -> str:
    options = {**chat.options, "tokenize": False, "add_generation_prompt": False, **ends}
    return str(_guarded(chat, lambda: owner.apply_chat_template(list(messages), **options)))


def _guarded(chat: Chat, call: Callable[[], Any]) -> Any:
    import jinja2

    try:
        return call()
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"{chat.where}: the chat template does not take these messages: {one_line(error)}"
        ) from error
