"""`predict_with_generate` by the inference engine: stands in for `model.generate` while a Trainer predicts.

What it returns is what `generate` does for a causal language model: the prompts as they were given, padded on the left,
and behind them the tokens, padded behind the end of text. The engine batches all rows of a step continuously. Rows that
it cannot answer as `generate` would (beams, inputs beside tokens, settings that it does not know) go to `generate`.

Ranks of one replica run in lockstep, so that each computes the rows of all of them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hyper_parallel.config.inference import Inference, Sampling
from hyper_parallel.data.generation_settings import ids_of
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.model_support import check_length, offered_engine
from hyper_parallel.inference.rank_groups import Replica
from hyper_parallel.inference.request import Request, Running, no_text
from hyper_parallel.inference.sampler import Decide, DecideTogether, Decision, decide
from hyper_parallel.integration.parallel_run import ParallelRun

log = logging.getLogger(__name__)

_INPUTS = frozenset({"input_ids", "attention_mask", "labels"})
_KNOWN = frozenset(
    {
        "max_length",
        "max_new_tokens",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "synced_gpus",
        "use_cache",
        "cache_implementation",
        "transformers_version",
        # These say how beams are compared, and how an assistant drafts.
        "length_penalty",
        "early_stopping",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
    }
)
"""Settings that the engine has, or that change no token of what it answers."""
_NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
}
"""Values of other settings that do nothing."""


@dataclass(frozen=True)
class _Wanted:
    """How a batch is answered."""

    sampling: Sampling
    eos: frozenset[int]
    pad: int


class EngineGenerate:
    """Generates for one Trainer's model."""

    def __init__(self, model: Any, spread: ParallelRun, seed: int, uses: bool = True) -> None:
        """`uses`: whether the engine is used at all."""
        self._model, self._spread, self._seed, self._uses = model, spread, seed, uses
        self._made = False
        self._engine: Engine | None = None
        self._decide: Decide = decide
        self._row = 0
        self.rows = 0
        """Rows that the engine has answered on this rank."""

    def begin(self) -> None:
        """An evaluation begins: its rows are numbered from 0, which decides what is drawn."""
        self._row = 0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, `model.generate` asks the engine first. The same on all ranks."""
        if not self._uses:
            yield
            return
        own = self._model.generate
        self._model.generate = lambda *args, **kwargs: self._generate(own, args, kwargs)
        try:
            yield
        finally:
            del self._model.generate

    def _generate(self, own: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        wanted: _Wanted | str
        if args or not isinstance(ids, Tensor) or ids.dim() != 2:
            wanted = "input_ids are not given as tokens"
        else:
            wanted = self._wanted(kwargs, ids.size(1))
        prompts = _prompts(ids, mask, wanted.pad) if isinstance(wanted, _Wanted) else wanted
        every = self._spread.gather_object(prompts)
        shares = [one for one in every if not isinstance(one, str)]
        found: Tensor | str
        if isinstance(wanted, str) or not isinstance(ids, Tensor) or len(shares) < len(every):
            found = next((one for one in every if isinstance(one, str)), "")
        else:
            found = self._answer(wanted, shares, ids)
        if isinstance(found, str):
            log.info("predict_with_generate uses model.generate: %s", found)
            return own(*args, **kwargs)
        return found

    def _answer(self, wanted: _Wanted, every: list[list[list[int]]], ids: Tensor) -> Tensor | str:
        """Prompts of all shares of the batch to the tokens of this one's; or why it cannot be."""
        longest = max(len(prompt) for share in every for prompt in share) + wanted.sampling.max_tokens
        engine = self._offered()
        if engine is None:
            return f"{type(self._model).__name__} is refused by the engine"
        try:
            check_length(self._model.config.get_text_config(decoder=True), longest)
        except UnsupportedModelError as error:
            return str(error)
        counts = [len(share) for share in every]
        shares = self._of_replica(len(every))
        requests, own = list[Request](), range(0)
        for share in shares:
            first = self._row + sum(counts[:share])
            if share == self._spread.data_index:
                own = range(len(requests), len(requests) + counts[share])
            requests += [
                Request(ids=tuple(prompt), sampling=wanted.sampling, seed=self._seed, row=first + place)
                for place, prompt in enumerate(every[share])
            ]
        self._row += sum(counts)
        answers = self._run(engine, requests, wanted)
        self.rows += len(own)
        return _padded(ids, [answers[place] for place in own], wanted.pad)

    def _run(self, engine: Engine, requests: list[Request], wanted: _Wanted) -> list[list[int]]:
        """Tokens of each answer, with the one that ends it."""
        last: dict[int, int] = {}

        def remembered(ready: Sequence[Running], logits: Tensor) -> list[Decision]:
            decided = self._decide(ready, logits)
            last.update((one.number, token) for one, (token, _) in zip(ready, decided, strict=True))
            return decided

        engine.decide, engine.eos = remembered, wanted.eos
        found = dict(engine.run(requests, Inference(), no_text))
        return [
            [*found[place].tokens, *([last[place]] if found[place].finish == "stop" else [])]
            for place in range(len(requests))
        ]

    def _offered(self) -> Engine | None:
        if not self._made:
            self._made = True
            self._engine = offered_engine(self._model, "predict_with_generate", frozenset())
            replica = Replica.of(self._model)
            if replica.group is not None:
                self._decide = DecideTogether(replica.group, replica.leads)
        return self._engine

    def _of_replica(self, shares: int) -> range:
        """The shares of the batch that ranks of this replica have."""
        size = shares // self._spread.handle.mesh.size("replicate")
        first = self._spread.data_index // size * size
        return range(first, first + size)

    def _wanted(self, kwargs: Mapping[str, Any], width: int) -> _Wanted | str:
        """The settings of the generation config and, over it, of the keywords; or the setting that the engine does not
        know."""
        config = copy.deepcopy(kwargs.get("generation_config") or self._model.generation_config)
        given = {
            name: value
            for name, value in kwargs.items()
            if name not in {"generation_config", *_INPUTS} and value is not None
        }
        plain = vars(GenerationConfig())
        settings = {name: value for name, value in vars(config).items() if not name.startswith("_")} | given
        for name, value in settings.items():
            if (
                name in _KNOWN
                or value is None
                or value is False
                or value == _NEUTRAL.get(name, plain.get(name))
            ):
                continue
            return f"{name}={value!r} is not a setting of the engine's"
        eos = ids_of(settings.get("eos_token_id"))
        pad = settings.get("pad_token_id")
        if pad is None:
            pad = eos[0] if eos else 0
        tokens = self._tokens(config, given, width)
        if tokens is None or tokens < 1:
            return "neither max_new_tokens nor a max_length beyond the prompt is set"
        sampled = bool(settings.get("do_sample"))
        top_k, top_p = settings.get("top_k"), settings.get("top_p")
        temperature, penalty = settings.get("temperature"), settings.get("repetition_penalty")
        top_k = 50 if top_k is None else top_k
        sampling = Sampling(
            max_tokens=tokens,
            temperature=(1.0 if temperature is None else float(temperature)) if sampled else 0.0,
            top_k=int(top_k) if sampled and top_k else None,
            top_p=float(top_p) if sampled and top_p is not None else None,
            repetition_penalty=1.0 if penalty is None else float(penalty),
        )
        return _Wanted(sampling, frozenset(eos), int(pad))

    @staticmethod
    def _tokens(config: Any, given: Mapping[str, Any], width: int) -> int | None:
        """Tokens of an answer, at most, as `generate` counts: keywords first, and new tokens before the length."""
        for source in (given, vars(config)):
            if source.get("max_new_tokens") is not None:
                return int(source["max_new_tokens"])
            length = source.get("max_length")
            if length is not None and (source is given or length != 20):  # 20 is `generate`'s own default
                return int(length) - width
        return None


def _prompts(ids: Any, mask: Any, pad: int) -> list[list[int]] | str:
    """The rows without their padding on the left; or why they have none."""
    if mask is None:
        if bool((ids == pad).any()):
            return "rows have the padding token and no attention_mask"
        return [list(row) for row in ids.tolist()]
    if mask.shape != ids.shape or not bool((mask[:, -1] == 1).all()):
        return "rows are not padded on the left"
    counts = mask.long().sum(-1)
    whole = torch.arange(ids.size(1), device=ids.device) >= (ids.size(1) - counts).unsqueeze(1)
    if not torch.equal(whole, mask.bool()):
        return "attention_mask hides tokens between others"
    return [row[len(row) - count :] for row, count in zip(ids.tolist(), counts.tolist(), strict=True)]


def _padded(ids: Tensor, answers: Sequence[Sequence[int]], pad: int) -> Tensor:
    """[B, prompt + longest answer]."""
    longest = max(map(len, answers), default=0)
    rows = [[*answer, *[pad] * (longest - len(answer))] for answer in answers]
    return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device).view(len(ids), longest)], 1)
