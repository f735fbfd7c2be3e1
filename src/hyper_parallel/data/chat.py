"""Chat templates: conversations to text, with the assistant's answers marked.

If a template marks answers with `{% generation %}`, its marks are used. For any other template, an answer is the
difference to the rendering of the conversation before it, up to the generation prompt:

    start = len(render(messages[:i], add_generation_prompt=True))
    end   = len(render(messages[:i + 1]))

This requires both to be prefixes of the whole rendering. A template for which this check fails is refused, because its
loss would fall on the wrong tokens. If a template has no generation prompt, or the assistant speaks first, the answer
starts where the template puts a probe text in place of the content.
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
"""The built-in template: each message is `<|role|>`, a line break, its content and the end-of-text token, which any
tokenizer has and at which generation stops.
"""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Replaces an answer to find the text that a template puts around it; unlikely in a user's text.
_PROBE = "\x02answer\x03"
_MEND = (
    "use a chat template that marks answers with {% generation %}, or write one conversation for each answer"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """The characters [start, end) of each answer, its end-of-turn token included."""
    open: bool
    """Whether the last answer ends the conversation and the template adds no end-of-turn token."""


def marks_answers(template: str) -> bool:
    """Whether a template marks the assistant's answers with `{% generation %}`."""
    return _GENERATION.search(template) is not None


def marked(processor: Any, chat: Chat) -> Rendered:
    """A conversation rendered by a processor whose template marks its answers."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    template, special = _template_of(processor), processor.tokenizer.special_tokens_map
    try:
        [text], [answers] = render_jinja_template(
            [chat.messages], chat_template=template, return_assistant_tokens_mask=True, **special
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataError(_not_taken(chat, error)) from error
    if not answers:
        raise DataError(_no_answer(chat))
    return Rendered(text, tuple((int(start), int(end)) for start, end in answers), open=False)


def _template_of(processor: Any) -> str:
    own = processor.chat_template
    return str(own["default"] if isinstance(own, dict) else own)


def tokens(tokenizer: Any, chat: Chat) -> tuple[list[int], list[int]]:
    """The ids of a conversation whose template marks its answers, with 1 for each id that contributes to the loss."""
    encoded = _apply(
        tokenizer, chat, chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    if not any(mask):
        raise DataError(_no_answer(chat))
    return list(ids), [int(bears) for bears in mask]


def render(tokenizer: Any, chat: Chat) -> Rendered:
    """A rendered conversation with the character ranges of its answers, for a template that does not mark them.

    Raises DataError if the template refuses the messages, or if an answer cannot be separated from the rest.
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
    """A conversation rendered up to the generation prompt."""
    return _text(tokenizer, chat, chat.messages, add_generation_prompt=True)


def conversation(tokenizer: Any, chat: Chat) -> str:
    """A whole conversation rendered, without a generation prompt."""
    return _text(tokenizer, chat, chat.messages)


def _start(tokenizer: Any, chat: Chat, index: int, whole: str, header: str) -> int:
    """The start of the answer: after the generation prompt, or after the header if there is none."""
    start = header
    if index:
        before = _text(tokenizer, chat, chat.messages[:index])
        prompted = _text(tokenizer, chat, chat.messages[:index], add_generation_prompt=True)
        start = header if prompted == before else prompted
    if not whole.startswith(start):
        raise DataError(_not_a_prefix(chat, index))
    return len(start)


def _around(tokenizer: Any, chat: Chat, index: int) -> tuple[str, str]:
    """The text that the template puts before and after the content of message `index` if it is the last one."""
    as_parts = isinstance(chat.messages[index].get("content"), list)
    content = [{"type": "text", "text": _PROBE}] if as_parts else _PROBE
    probe = [*chat.messages[:index], {**chat.messages[index], "content": content}]
    header, found, trailer = _text(tokenizer, chat, probe).partition(_PROBE)
    if not found:
        raise DataError(
            f"{chat.where}: the chat template does not show message {index} as it is written; {_MEND}"
        )
    return header, trailer


def _not_a_prefix(chat: Chat, index: int) -> str:
    return (
        f"{chat.where}: the chat template renders the beginning of the conversation differently once message "
        f"{index} is followed by more, so that its answers cannot be located; {_MEND}"
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
        raise DataError(_not_taken(chat, error)) from error


def _not_taken(chat: Chat, error: BaseException) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"{chat.where}: the chat template does not take these messages: {reason}"


def _no_answer(chat: Chat) -> str:
    return f"{chat.where}: the chat template marks no token of this conversation as an answer; {_MEND}"
