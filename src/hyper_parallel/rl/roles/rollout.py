"""A rollout: answers prompts on the inference engine, a bounded number of passes at a time.

Each token is kept with its log-probability and the version of the weights that drew it. New weights are installed
between passes: answers under way go on behind the tokens that they have, whose keys and values are computed again by
the new weights. So the log-probability of every token is that of its version, given all tokens before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hyper_parallel.config.generate import inference_settings
from hyper_parallel.config.inference import Inference, Sampling
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.chat import conversation, prompt
from hyper_parallel.data.document import Chat
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.inference.engine import Engine, OpenRun
from hyper_parallel.inference.memory_budget import MemoryBudget
from hyper_parallel.inference.model_support import check_length, check_model, prove
from hyper_parallel.inference.rank_groups import Agreement, Replica
from hyper_parallel.inference.request import Completion, Request, Running, prompt_ids
from hyper_parallel.inference.sampler import DecideTogether
from hyper_parallel.inference.weights.tiers import ModelSource
from hyper_parallel.rl.controller.prompts import fitting
from hyper_parallel.rl.roles.models import ends_of
from hyper_parallel.rl.sample import Prompted, Sample
from hyper_parallel.strategy.memory import GenerationMemory


@dataclass
class _Answer:
    """Under way."""

    asked: Prompted
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    turn: int = 0
    """Tokens before the policy's last turn."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """As `Sample` has them."""

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], version: int, *, drawn: bool) -> None:
        """Tokens behind those that it has."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)
        self.drawn += [drawn] * len(tokens)


class Rollout:
    """One copy of the policy that generates, on this rank. Ranks of one copy are given the same calls; copies along
    `replicate` each answer their part."""

    def __init__(self, config: RLConfig, model: nn.Module, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.version = 0
        role, rl = config.roles.rollouts, config.rl
        self._overlong = config.task.overlong
        self._model_config = check_model(model)
        self._replica = Replica.of(model)
        ends = ends_of(model, tokenizer, config.model.folder)
        self._engine = Engine(model, role.page, layers=int(self._model_config.num_hidden_layers), eos=ends)
        device = next(model.parameters()).device
        self._engine.cache.agreement = Agreement(self._replica.group, device)
        if self._replica.group is not None:
            self._engine.decide = DecideTogether(self._replica.group, self._replica.leads)
        self._budget = self._proved(role.spread.memory, device)
        self._settings = inference_settings(
            {
                "max_tokens": rl.max_tokens,
                "temperature": rl.temperature,
                "logprobs": "drawn",
                "batch": role.batch,
                "page": role.page,
                "rows": max(128, role.page, role.batch),
            }
        )
        self._seed = config.seed
        self._answers: dict[int, _Answer] = {}
        self._numbers = 0
        self._longest = 0
        """Tokens of the longest prompt that the run has memory for."""
        self._run: OpenRun | None = None
        self._opened = contextlib.ExitStack()

    def generate(self, new: Sequence[Prompted], passes: int) -> list[Sample]:
        """Take these prompts on, and compute at most `passes` passes; the answers that ended. The first rank of a copy
        gives them, the others none.

        Raises DataError for a prompt that cannot be read, UnsupportedModelError for one that is too long.
        """
        own = [one for place, one in enumerate(new) if place % self._replica.count == self._replica.index]
        for one in own:
            self._take(one)
        if not self._answers:
            return []
        run = self._opened_run()  # under a budget it measures passes of made-up requests first
        self._engine.taken = self._taken
        try:
            ended = run.advance(passes)
        finally:
            self._engine.taken = lambda one, token, logprob: None
        found = [self._ended(number, answer) for number, answer in ended]
        return found if self._replica.leads else []

    @property
    def busy(self) -> int:
        """Answers under way."""
        return len(self._answers)

    def renewed(self, version: int) -> None:
        """The weights are those of `version` from now on."""
        self.version = version
        self._close()

    def drop(self, tickets: Sequence[int]) -> None:
        """Give up the answers of these groups."""
        gone = set(tickets)
        numbers = {number for number, one in self._answers.items() if one.asked.ticket in gone}
        if self._run is not None:
            self._run.cancel(numbers)
        for number in numbers:
            del self._answers[number]

    def give_up(self) -> None:
        """Give up all answers under way."""
        self._answers.clear()
        self._close()

    def answer(
        self,
        asked: Sequence[Prompted],
        *,
        temperature: float,
        seed: int,
    ) -> list[Sample]:
        """One answer to each prompt, or its next turn, at once, beside those under way: of an evaluation, which needs
        no log-probabilities. Every rank gives all of them. Raises as `generate`."""
        sampling = self._settings.sampling().model_copy(
            update={"temperature": temperature, "logprobs": False}
        )
        begun = [self._begun(one, sampling, seed) for one in asked]
        requests = [_going_on(one) for one in begun]
        settings = Inference(**{**self._settings.model_dump(), "temperature": temperature, "logprobs": False})
        found: dict[int, Sample] = {}
        if self._budget is not None:
            self._close()  # of its memory only one run at a time has pages
        with _worded():
            for number, completion in self._engine.run(requests, settings, self.tokenizer.decode):
                one = begun[number]
                new = completion.tokens[len(one.tokens) :]
                one.add(new, [0.0] * len(new), self.version, drawn=True)
                found[number] = self._sample(one, completion)
        return [found[number] for number in range(len(asked))]

    def release(self) -> None:
        """Give the memory of the KV cache back. Answers under way go on as under new weights."""
        self._close()

    @property
    def cache_bytes(self) -> int:
        """Of the KV cache now."""
        return self._engine.cache.resident

    def close(self) -> None:
        """Give up everything."""
        self.give_up()
        self._engine.cache.close()
        if self._budget is not None:
            self._budget.close()

    def _proved(self, memory: GenerationMemory, device: torch.device) -> MemoryBudget | None:
        """Compare the engine with the model, within a budget where there is one; runs of the engine keep to it then."""
        if memory.device is None:
            prove(self._engine, self._model_config)
            return None
        budget = MemoryBudget(
            self.model,
            ModelSource(self.model),
            memory,
            device,
            restore=True,
            agreement=self._engine.cache.agreement,
        )
        with _worded():
            budget.prove(self._engine, lambda: prove(self._engine, self._model_config))
        return budget

    def _take(self, asked: Prompted) -> None:
        answer = self._begun(asked, self._settings.sampling(), self._seed)
        number, self._numbers = self._numbers, self._numbers + 1
        self._answers[number] = answer
        length = len(answer.request.ids)
        if length > self._longest:
            self._longest = length
            self._close()
        elif self._run is not None:
            self._run.submit(number, _going_on(answer))

    def _begun(self, asked: Prompted, sampling: Sampling, seed: int) -> _Answer:
        """An answer with the tokens that it has before its next turn."""
        before = asked.before
        ids = tuple(self._prompt_ids(asked)) if before is None else before.prompt
        check_length(self._model_config, len(ids) + sampling.max_tokens)
        request = Request(ids=ids, sampling=sampling, seed=seed, row=asked.row, sample=asked.place)
        answer = _Answer(asked, request)
        if before is not None:
            answer.tokens, answer.logprobs = list(before.tokens), list(before.logprobs)
            answer.versions, answer.drawn = list(before.versions), list(before.drawn)
            # The policy has at least one token to answer with.
            room = max(0, sampling.max_tokens - 1 - len(before.tokens))
            added = self._appended(answer, before)[:room]
            answer.add(added, [0.0] * len(added), self.version, drawn=False)
            answer.turn = len(answer.tokens)
        return answer

    def _prompt_ids(self, asked: Prompted) -> list[int]:
        ids = prompt_ids(self.tokenizer, asked.prompt, asked.options)
        return fitting(ids, self._model_config, self._settings.sampling().max_tokens, self._overlong)

    def _appended(self, answer: _Answer, before: Sample) -> list[int]:
        """The tokens of what the environment says behind the turns of `before`."""
        asked = answer.asked
        if isinstance(asked.appended, str):
            return self.tokenizer.encode_raw([asked.appended])[0]
        assert not isinstance(asked.prompt, str), "messages answer conversations"
        told = [*asked.prompt, *before.turns]
        answer.turns = (*before.turns, {"role": "assistant", "content": before.text}, asked.appended)
        last = before.tokens[-1] if before.ended else None
        return tokens_behind(self.tokenizer, told, before.text, asked.appended, last, asked.options)

    def _opened_run(self) -> OpenRun:
        """The run under way, or a new one with all answers that have begun."""
        if self._run is None:
            longest = Request(ids=(0,) * self._longest, sampling=self._settings.sampling())
            like = [longest] * self._settings.batch
            with _worded():
                self._run = self._opened.enter_context(
                    self._engine.open_run(like, self._settings, self.tokenizer.decode)
                )
            for number, one in self._answers.items():
                self._run.submit(number, _going_on(one))
        return self._run

    def _close(self) -> None:
        if self._run is not None:
            self._run.withdraw()
            self._run = None
        self._opened.close()

    def _taken(self, one: Running, token: int, logprob: float | None) -> None:
        assert logprob is not None, "asked for in the settings"
        self._answers[one.number].add([token], [logprob], self.version, drawn=True)

    def _ended(self, number: int, completion: Completion) -> Sample:
        return self._sample(self._answers.pop(number), completion)

    def _sample(self, one: _Answer, completion: Completion) -> Sample:
        return Sample(
            ticket=one.asked.ticket,
            place=one.asked.place,
            row=one.asked.row,
            prompt=one.request.ids,
            tokens=tuple(one.tokens),
            logprobs=tuple(one.logprobs),
            versions=tuple(one.versions),
            drawn=tuple(one.drawn),
            ended=completion.finish == "stop",
            text=self.tokenizer.decode(one.tokens[one.turn :]),
            turns=one.turns,
        )


@contextlib.contextmanager
def _worded() -> Iterator[None]:
    """Inside, errors of a budget name the keys of this file."""
    try:
        yield
    except ConfigError as error:
        text = str(error).removesuffix(_TIERS)
        for other, own in _KEYS.items():
            text = text.replace(other, own)
        raise type(error)(text) from error


_TIERS = ", or set memory.host, pool or flash, so that weights can leave the device"
"""Advice that is not for a rollout, whose weights change."""
_KEYS = {
    "memory.device": "roles.rollout.strategy.memory.device",
    "inference.max_tokens": "rl.max_tokens",
    "inference.page": "roles.rollout.page",
}


def _going_on(one: _Answer) -> Request:
    """The request behind the tokens that it has."""
    ids = one.request.ids + tuple(one.tokens)
    return replace(one.request, ids=ids, answered=len(one.tokens))


# Tokens behind an answer in a conversation: the end of its turn and the environment's message, as a template has them.
#
# The tokens of an answer are those that the policy drew. They are never made from its text again, which may give
# others. Behind them come the tokens of END REST without what the policy drew of END, where with C the messages before,
# a probe in place of the answer's content, and M the environment's message
#
#     render(C + [probe])                        = render(C) ... probe END
#     render(C + [probe, M], generation prompt)  = render(C) ... probe END REST
#
# A template that does not have this form, or that leaves out a part of the answer once M follows, is refused: it would
# show the policy another conversation in its next turn than the one whose tokens are trained.

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
