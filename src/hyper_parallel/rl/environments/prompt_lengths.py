"""Lengths of prompts: what a model has no positions for is found before the first step, by the row's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hyper_parallel.data import Tokenizer
from hyper_parallel.errors import DataError
from hyper_parallel.inference.model_support import longest_text
from hyper_parallel.inference.prompt_ids import prompt_ids
from hyper_parallel.rl.environments.environment import prompt_fields

Overlong = Literal["error", "drop", "truncate_left"]


class PromptLengths:
    """Encodes each row's prompt once, and says whether the row stays."""

    def __init__(self, tokenizer: Tokenizer, model_config: Any, max_tokens: int, overlong: Overlong) -> None:
        """`max_tokens`: of an answer. `overlong`: what becomes of a row that has too many tokens."""
        self._tokenizer, self._config, self._tokens = tokenizer, model_config, max_tokens
        self._overlong = overlong
        self.dropped = 0
        """Rows that were left out."""

    def accept(self, row: Mapping[str, Any]) -> bool:
        """Whether a row stays. Raises DataError for a prompt without tokens, and for one that is too long if that is an
        error."""
        ids = prompt_ids(self._tokenizer, **prompt_fields(row))
        try:
            fitting(ids, self._config, self._tokens, self._overlong)
        except DataError:
            if self._overlong != "drop":
                raise
            self.dropped += 1
            return False
        return True


def fitting(ids: Sequence[int], model_config: Any, max_tokens: int, overlong: Overlong) -> list[int]:
    """The prompt's ids, or its last ones (`truncate_left`), that leave positions for an answer. Raises DataError."""
    most = longest_text(model_config)
    if most is None or len(ids) + max_tokens <= most:
        return list(ids)
    if overlong == "truncate_left" and max_tokens < most:
        return list(ids[len(ids) + max_tokens - most :])
    raise DataError(
        f"the prompt has {len(ids)} tokens, and the model's {most} positions leave {max(most - max_tokens, 0)} beside "
        f"rl.max_tokens ({max_tokens}); lower rl.max_tokens, or set task.overlong to drop or truncate_left"
    )
