"""Prompts of a run, counted without end: row r is a function of the seed and r alone. Lengths are checked first."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.data import Tokenizer
from hyper_parallel.errors import ConfigError, DataError, nearest
from hyper_parallel.inference.model_support import longest_text
from hyper_parallel.inference.request import prompt_ids
from hyper_parallel.report.wait_line import waiting
from hyper_parallel.rl.environments import prompt_fields
from hyper_parallel.rl.roles.models import tokenizer_of
from hyper_parallel.rl.tasks import read_tasks, tasks
from hyper_parallel.step.build import transformers_config

log = logging.getLogger(__name__)
Row = dict[str, Any]


class Prompts:
    """Training prompts in their order, and the held-out ones. Raises DataError, ConfigError."""

    def __init__(self, config: RLConfig) -> None:
        self._config, task = config, config.task
        self._rows: Sequence[Row] | None = None
        """Of a file."""
        self.held_out: Sequence[Row] = []
        """Of an evaluation; empty where the file has none."""
        count = config.eval.prompts
        if task.name is not None:
            _check_settings(task.settings)
            self.held_out = tasks(task.name, config.seed, "held_out", count, **task.settings)
            return
        assert task.prompts is not None, "checked by the config"
        model_config = transformers_config(config.model).get_text_config(decoder=True)
        lengths = PromptLengths(tokenizer_of(config), model_config, config.rl.max_tokens, task.overlong)
        with waiting("reading the prompts and counting their tokens"):
            self._rows = read_tasks(Path(task.prompts).expanduser(), lengths.accept)
            if task.held_out is not None:
                self.held_out = read_tasks(Path(task.held_out).expanduser(), lengths.accept)[:count]
        if lengths.dropped:
            log.warning("task.overlong: %d rows are left out, whose prompts are too long", lengths.dropped)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __getitem__(self, row: int) -> Row:
        return self.between(row, row + 1)[0]

    def between(self, first: int, end: int) -> Sequence[Row]:
        """Rows `first` to `end` - 1."""
        task = self._config.task
        if self._rows is None:
            assert task.name is not None
            return tasks(task.name, self._config.seed, "train", end - first, first=first, **task.settings)
        size = len(self._rows)
        return [self._rows[self._order(row // size)[row % size]] for row in range(first, end)]

    def _shuffled(self, epoch: int) -> list[int]:
        assert self._rows is not None
        order = list(range(len(self._rows)))
        random.Random(f"{self._config.seed}:{epoch}").shuffle(order)
        return order


def _check_settings(given: Mapping[str, Any]) -> None:
    known = ("digits",)
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"task.settings: a task has no {key!r}{nearest(key, known)}; it has {', '.join(known)}"
            )
        if type(value) is not int:
            raise ConfigError(f"task.settings.{key}: must be a whole number (got {value!r})")


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
