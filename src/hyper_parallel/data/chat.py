"""Chat templates: conversations to text, with the assistant's answers marked.

A template that marks answers itself (`{% generation %}`) is taken at its word. For any other, an answer is
what the template adds to the conversation before it, rendered up to the point where the assistant is to
speak:

    start = len(render(messages[:i], add_generation_prompt=True))
    end   = len(render(messages[:i + 1]))

which holds only if both are prefixes of the whole rendering; that is checked, and a template for which it
fails is refused, because its loss would fall on the wrong tokens. Where a template has no generation prompt,
or the assistant speaks first, the answer starts where the template puts a probe that stands in for its
content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hyper_parallel.data.document import Chat
from hyper_parallel.errors import DataError

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|assistant|>\\n' }}{% endif %}"
)
"""Used when a tokenizer has no template: each message is `<|role|>`, a line break, its content and the
end-of-text token, which any tokenizer has and at which generation stops."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Stands in for an answer to see what a template puts around one; hardly a text that a user has.
_PROBE = "\x02answer\x03"
_MEND = (
    "use a chat template that marks answers with {% generation %}, or write one conversation for each answer"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """The characters [start, end) of each answer, its end-of-turn token included."""
    open: bool
    """The last answer ends the conversation and the template ends it with no token of its own."""


def marks_answers(template: str) -> bool:
    """Whether a template says itself, by `{% generation %}`, what the assistant's answers are."""
    return _GENERATION.search(template) is not None


def tokens(tokenizer: Any, chat: Chat) -> tuple[list[int], list[int]]:
    """The ids of a conversation whose template marks its answers and, for each id, 1 where it bears loss."""
    encoded = _apply(
        tokenizer, chat, chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    if not any(mask):
        raise DataError(
            f"{chat.where}: the chat template marks no token of this conversation as an answer; {_MEND}"
        )
    return list(ids), [int(bears) for bears in mask]


def render(tokenizer: Any, chat: Chat) -> Rendered:
    """A conversation as text with the answers' characters; for a template that does not mark them.

    Raises DataError when the template refuses the messages, or when an answer cannot be told from the rest.
    """
    whole = _text(tokenizer, chat, chat.messages)
    answers: list[tuple[int, int]] = []
    is_open = False
    for index, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        header, trailer = _around(tokenizer, chat, index)
        start = _start(tokenizer, chat, index, whole, header)
        after = _text(tokenizer, chat, chat.messages[: index + 1])
        if not whole.startswith(after) or len(after) < start:
            raise DataError(_not_a_prefix(chat, index))
        # White space behind the end-of-turn token belongs to no answer; where a template has no such token,
        # the white space is what ends the turn.
        bare = not trailer.strip()
        answers.append((start, len(after) if bare else len(after.rstrip())))
        is_open = bare and index + 1 == len(chat.messages)
    return Rendered(whole, tuple(answers), is_open)


def prompt(tokenizer: Any, chat: Chat) -> str:
    """A conversation as text, up to where the assistant is to speak."""
    return _text(tokenizer, chat, chat.messages, add_generation_prompt=True)


def _start(tokenizer: Any, chat: Chat, index: int, whole: str, header: str) -> int:
    """Where the answer begins: behind the generation prompt, or behind the header without one."""
    start = header
    if index:
        before = _text(tokenizer, chat, chat.messages[:index])
        prompted = _text(tokenizer, chat, chat.messages[:index], add_generation_prompt=True)
        start = header if prompted == before else prompted
    if not whole.startswith(start):
        raise DataError(_not_a_prefix(chat, index))
    return len(start)


def _around(tokenizer: Any, chat: Chat, index: int) -> tuple[str, str]:
    """What the template puts before and after the content of message `index` where it is the last one."""
    probe = [*chat.messages[:index], {**chat.messages[index], "content": _PROBE}]
    header, found, trailer = _text(tokenizer, chat, probe).partition(_PROBE)
    if not found:
        raise DataError(
            f"{chat.where}: the chat template does not show message {index} as it is written; {_MEND}"
        )
    return header, trailer


def _not_a_prefix(chat: Chat, index: int) -> str:
    return (
        f"{chat.where}: the chat template renders the beginning of the conversation differently once message "
        f"{index} is followed by more, so that its answers cannot be told apart; {_MEND}"
    )


def _text(
    tokenizer: Any, chat: Chat, messages: list[dict[str, Any]], add_generation_prompt: bool = False
) -> str:
    return str(_apply(tokenizer, chat, messages, tokenize=False, add_generation_prompt=add_generation_prompt))


def _apply(tokenizer: Any, chat: Chat, messages: list[dict[str, Any]], **options: Any) -> Any:
    import jinja2

    try:
        return tokenizer.apply_chat_template(messages, **options)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{chat.where}: the chat template does not take these messages: {reason}") from error
