"""Token ids and loss of texts under each kind of tokenizer, beside the tokenizer's own call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness import tokenized_texts
from harness.tokenizer_kinds import KINDS

Encoded = tuple[list[int], list[int] | None]


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_the_call_and_answers_alone_bear_loss(name: str) -> None:
    found = tokenized_texts.counted(name, 6)
    assert not found["wrong"] and not found["unread"], found["first"]
    assert found["text"] == found["answer"] == found["chat"] == 6


def apart(document: Any, ids: list[int], mask: list[int] | None) -> Encoded:
    return [*ids[:1], *ids], None if mask is None else [0, *mask]


def late(document: Any, ids: list[int], mask: list[int] | None) -> Encoded:
    return ids, mask and [0, *mask[:-1]]


def early(document: Any, ids: list[int], mask: list[int] | None) -> Encoded:
    return ids, mask and [*mask[1:], 1]


def everywhere(document: Any, ids: list[int], mask: list[int] | None) -> Encoded:
    return ids, mask and [1] * len(ids)


@pytest.mark.parametrize("change", [apart, late, early, everywhere])
@pytest.mark.parametrize("name", ["byte-level, no bos", "sentencepiece, always", "wordpiece", "NFKC"])
def test_what_is_wrong_is_seen(
    name: str, change: Callable[..., Encoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tokenized_texts.encode

    def wrong(documents: Any, tokenizer: Any) -> Iterator[Encoded]:
        for document, (ids, mask) in zip(documents, right(documents, tokenizer), strict=True):
            yield change(document, ids, mask)

    monkeypatch.setattr(tokenized_texts, "encode", wrong)
    assert tokenized_texts.counted(name, 4)["wrong"]
