"""Random texts under a kind of tokenizer, judged: token ids and loss against the tokenizer's own call.

Each text is encoded alone, as a prompt with its response, and in a conversation; texts and beginnings of conversations
also as prompts that `generate` answers. Ids have to be those of the call or of `apply_chat_template`, with the
end-of-text token. Loss is checked without character ranges: the spellings of the tokens are laid one after the other,
which gives the place of each in the normalized text.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.tokenizer_kinds import KINDS, SIGNS, SPECIAL, WORDS, Kind
from hyper_parallel.data.corpus import encode
from hyper_parallel.data.document import Answer, Chat, Text, from_record
from hyper_parallel.data.tokenizer import Tokenizer as DataTokenizer
from hyper_parallel.errors import DataError
from hyper_parallel.inference.request import prompt_ids

SPACES = [" ", " ", "  ", "\n", "\n\n", "\t", "    ", "\r\n"]
STRIPPING = (b"<l>", b"<r>")
"""Tokens that take the white space beside them."""
ODD_SPACES = ["\u00a0", "\u3000", "\u2009"]
OPEN, CLOSE = "<|im_start|>{{ m.role }}\n", "<|im_end|>"
TOOLS = "{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "plain": f"{TOOLS}{{% for m in messages %}}{OPEN}{{{{ m.content }}}}{CLOSE}\n{{% endfor %}}{PROMPT}",
    "marked": f"{TOOLS}{{% for m in messages %}}{OPEN}{{% if m.role == 'assistant' %}}{{% generation %}}"
    f"{{{{ m.content }}}}{CLOSE}{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{CLOSE}{{% endif %}}"
    f"{{{{ '\\n' }}}}{{% endfor %}}{PROMPT}",
    # Drops earlier reasoning, and writes an empty block of it in the last turn.
    "reasoning": f"{TOOLS}{{% for m in messages %}}{OPEN}{{% if m.role == 'assistant' %}}{{% if loop.last %}}"
    "{% if '</think>' not in m.content %}<think></think>{% endif %}{{ m.content }}"
    f"{{% else %}}{{{{ m.content.split('</think>')[-1] }}}}{{% endif %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    f"{CLOSE}\n{{% endfor %}}{PROMPT}",
}
Spans = Sequence[tuple[int, int]]


def draw_text(draw: random.Random, kind: Kind, pieces: int) -> str:
    """A random text."""
    spaces = SPACES if kind.spaces == "dropped" else SPACES + ODD_SPACES
    text = ""
    for _ in range(draw.randint(0, pieces)):
        text += draw.choice(draw.choices((WORDS, spaces, SIGNS, [*SPECIAL, "<l>", "<r>"]), (5, 6, 4, 1))[0])
    # No longer word than BERT's.
    return re.sub(r"(\S{50})", r"\1 ", text) if kind.spaces == "dropped" else text


@dataclass
class Case:
    """A document, with the ids that it must have and the characters that bear loss."""

    document: Any
    text: str
    ids: list[int]
    loss: Spans
    before: int = 0
    """The number of tokens before the text."""
    behind: int = 0


def cases(draw: random.Random, kind: Kind, owner: Any, template: str) -> Iterator[Case]:
    """A text, a prompt with its response, and a conversation."""
    text = draw_text(draw, kind, 60)
    ids = ended(owner, text)
    yield Case(Text("text", text), text, ids, [])
    cut = draw.randint(0, max(len(text) - 1, 0))
    behind = len(kind.suffix) + (len(ids) > len(owner(text)["input_ids"]))
    answer = Answer("answer", text[:cut], text[cut:])
    yield Case(answer, text, ids, [(cut, len(text))], len(kind.prefix), behind)
    yield drawn_chat(draw, kind, owner, template)


def ended(owner: Any, text: str) -> list[int]:
    """The ids of the tokenizer's own call, with the end-of-text token where it does not end with it."""
    ids: list[int] = owner(text)["input_ids"]
    return ids if ids[-1:] == [owner.eos_token_id] else [*ids, owner.eos_token_id]


def drawn_chat(draw: random.Random, kind: Kind, owner: Any, template: str) -> Case:
    """A conversation, and its text written without the template."""
    roles = ["system"] * draw.randint(0, 1) + ["user", "assistant"] * draw.randint(1, 3)
    messages: list[dict[str, Any]] = [{"role": role, "content": draw_text(draw, kind, 12)} for role in roles]
    record: dict[str, Any] = {"messages": messages}
    if draw.random() < 0.3:
        record["tools"] = [{"type": "function", "function": {"name": draw_text(draw, kind, 4)}}]
    text, spans = "", []
    if "tools" in record:
        text = f"<|tools|>{json.dumps(record['tools'], ensure_ascii=False)}\n"
    for index, message in enumerate(messages):
        last, said = index + 1 == len(messages), message["content"]
        if message["role"] == "assistant" and template == "reasoning" and draw.random() < 0.5:
            message["content"] = f"<think>{draw_text(draw, kind, 4)}</think>{said}"
            said = message["content"] if last else said
        elif message["role"] == "assistant" and template == "reasoning" and last:
            said = f"<think></think>{said}"
        text += f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant" and not last and draw.random() < 0.3:
            message[draw.choice(["weight", "train", "loss_mask"])] = 0
        elif message["role"] == "assistant":
            spans.append((len(text), len(text) + len(said) + len(CLOSE)))
        text += f"{said}{CLOSE}\n"
    owner.chat_template = TEMPLATES[template]
    assert owner.apply_chat_template(messages, tools=record.get("tools"), tokenize=False) == text
    called = owner.apply_chat_template(messages, tools=record.get("tools"), tokenize=True, return_dict=True)
    return Case(from_record(record, "chat"), text, called["input_ids"], spans)


def prompts_of(case: Case, owner: Any) -> Iterator[tuple[Any, dict[str, Any], list[int] | None]]:
    """What `generate` may be given of a document: a text, or the beginnings of a conversation with what its template
    gets; and the ids of the tokenizer's own call, None where it refuses."""
    if isinstance(case.document, Text) and case.text:
        yield case.text, {}, owner(case.text)["input_ids"]
    if isinstance(case.document, Chat):
        for count in range(1, len(case.document.messages) + 1):
            messages, options = case.document.messages[:count], case.document.options
            begun = messages[-1]["role"] == "assistant"
            ends = {"continue_final_message" if begun else "add_generation_prompt": True}
            try:
                called = owner.apply_chat_template(
                    messages, tokenize=True, return_dict=True, **options, **ends
                )
            except ValueError:
                yield messages, options, None
            else:
                yield messages, options, called["input_ids"]


def loss_is_right(case: Case, mask: Sequence[int], kind: Kind, spellings: Sequence[bytes]) -> bool | None:
    """Whether the tokens with a character of an answer alone bear loss; None where spellings do not give the text."""
    stop = len(mask) - case.behind
    if any(mask[: case.before]) or not all(mask[stop:]):
        return False
    whole = kind.squeezed(case.text)
    inner = [(kind.squeeze(spelling), spelling) for spelling in spellings[case.before : stop]]
    if b"".join(squeezed for squeezed, _ in inner) != whole:
        return None
    # A border inside what the normalizer composes lies at none of its bytes: certain and possible places of an answer.
    certain, possible = [], []
    for span in case.loss:
        (low, high), (end_low, end_high) = (borders(kind, case.text, whole, at) for at in span)
        certain.append((high, end_low))
        possible.append((low, end_high))
    place = 0
    for (squeezed, spelling), bears in zip(inner, mask[case.before : stop], strict=True):
        here = (place, place + len(squeezed))
        place = here[1]
        # White space that is squeezed out may lie on the other side of a border.
        beside = here if squeezed == spelling and spelling not in STRIPPING else (here[0] - 1, here[1] + 1)
        wrong = bears and not overlaps(beside, possible)
        if squeezed and (wrong or (not bears and overlaps(here, certain))):
            return False
    return True


def borders(kind: Kind, text: str, whole: bytes, at: int) -> tuple[int, int]:
    """The least and the greatest place in the squeezed text of the border before character `at`."""
    before = shared(kind.squeezed(text[:at]), whole)
    behind = len(whole) - shared(kind.squeezed(text[at:])[::-1], whole[::-1])
    return min(before, behind), max(before, behind)


def shared(one: bytes, other: bytes) -> int:
    """The length of what both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def overlaps(here: tuple[int, int], spans: Spans) -> bool:
    """Whether a range shares a place with any."""
    return any(here[0] < end and start < here[1] for start, end in spans)


def counted(name: str, texts: int) -> dict[str, Any]:
    """The verdicts on random texts under one tokenizer, with the first that is wrong."""
    kind = KINDS[name]()
    tokenizer, owner = DataTokenizer(kind.tokenizer()), kind.tokenizer()
    added, count, first = set(owner.get_added_vocab()), Counter[str](), None
    spelt: dict[int, bytes] = {}
    for number in range(texts):
        draw = random.Random(f"0 {name} {number}")
        template = list(TEMPLATES)[number % len(TEMPLATES)]
        tokenizer.transformers.chat_template = TEMPLATES[template]
        for case in cases(draw, kind, owner, template):
            count[what := type(case.document).__name__.lower()] += 1
            try:
                [(ids, mask)] = encode([case.document], tokenizer)
            except DataError as error:
                verdict: Any = f"refused: {error}"
            else:
                for token in set(ids) - spelt.keys():
                    spelt[token] = kind.spelling(owner.convert_ids_to_tokens(token), added)
                verdict = "other ids" if ids != case.ids else None
                if verdict is None and mask is not None:
                    right = loss_is_right(case, mask, kind, [spelt[token] for token in ids])
                    count["unread"] += right is None
                    verdict = "other loss" if right is False else None
            for prompt, options, expected in prompts_of(case, owner):
                count["prompt"] += 1
                try:
                    given: list[int] | None = prompt_ids(tokenizer, prompt, options)
                except DataError:
                    given = None
                if verdict is None and given != (expected or None):
                    verdict = "another prompt"
            if verdict is not None:
                count["wrong"] += 1
                first = first or f"{what} {number}: {verdict}: {case.text[:200]!r}"
    names = ("text", "answer", "chat", "prompt", "unread", "wrong")
    return {**{key: count[key] for key in names}, "first": first}
