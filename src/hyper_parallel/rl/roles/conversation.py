"""Tokens behind an answer in a conversation: the end of its turn and the environment's message, as a template has them.

The tokens of an answer are those that the policy drew. They are never made from its text again, which may give others.
Behind them come the tokens of END REST without what the policy drew of END, where with C the messages before, a probe
in place of the answer's content, and M the environment's message

    render(C + [probe])                        = render(C) ... probe END
    render(C + [probe, M], generation prompt)  = render(C) ... probe END REST

A template that does not have this form, or that leaves out a part of the answer once M follows, is refused: it would
show the policy another conversation in its next turn than the one whose tokens are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.data import Tokenizer
from hyper_parallel.data.chat import conversation, prompt
from hyper_parallel.data.document import Chat
from hyper_parallel.errors import DataError

_PROBE = "\x02answer\x03"
"""Unlikely in a message."""
_WHERE = "task.environment"
_MEND = "take a template that keeps what was said, or write prompts as texts"


def tokens_behind(
    tokenizer: Tokenizer,
    before: Sequence[Mapping[str, Any]],
    answer: str,
    message: Mapping[str, Any],
    last: int | None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids behind an answer's tokens, up to the generation prompt of the next answer.

    `before`: the messages up to the answer. `answer`: its text. `message`: what comes behind it. `last`: the token that
    ended it, None where none did. `options`: what the template gets beside the messages. Raises DataError, in one line,
    for a template that does not take the messages or is not of the form above.
    """
    end, rest = _behind(tokenizer, before, answer, message, dict(options or {}))
    [(ids, ranges)] = tokenizer.encode_template([end + rest])
    for at, (one, (start, _)) in enumerate(zip(ids, ranges, strict=True)):
        if start >= len(end):
            break
        if one == last:
            return ids[at + 1 :]
    return ids


def _behind(
    tokenizer: Tokenizer,
    before: Sequence[Mapping[str, Any]],
    answer: str,
    message: Mapping[str, Any],
    options: dict[str, Any],
) -> tuple[str, str]:
    """END and REST."""
    told = [dict(one) for one in before]

    def chat(*more: dict[str, Any]) -> Chat:
        return Chat(_WHERE, [*told, *more], options=options)

    probe, given = {"role": "assistant", "content": _PROBE}, dict(message)
    own = tokenizer.transformers
    start = conversation(own, chat())
    alone, followed = conversation(own, chat(probe)), prompt(own, chat(probe, given))
    _, shown, end = alone.partition(_PROBE)
    head, again, behind = followed.partition(_PROBE)
    if not (
        shown and again and alone.startswith(start) and head.startswith(start) and behind.startswith(end)
    ):
        raise DataError(
            f"{_WHERE}: the chat template does not keep a conversation as it was once a message of the role "
            f"{given.get('role')!r} follows; {_MEND}"
        )
    said = {"role": "assistant", "content": answer}
    kept = prompt(own, chat(said, given))
    if not kept.startswith(conversation(own, chat(said))) and answer.strip() not in kept[len(start) :]:
        raise DataError(
            f"{_WHERE}: the chat template leaves out a part of an answer once a message of the role "
            f"{given.get('role')!r} follows; {_MEND}"
        )
    return end, behind[len(end) :]
