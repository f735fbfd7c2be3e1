"""`Generator`: answers to prompts, from a model in memory or in a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.config.generate import budget_of, check_strategy, generation_memory, inference_settings
from hyper_parallel.config.inference import Inference
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.generation_settings import stop_tokens
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.hub import Wanted, fetched_folder, parse, pinned
from hyper_parallel.inference.blocked_products import column_major
from hyper_parallel.inference.context_parallel import ContextEngine
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.kv_cache.page_pool import filled_keys
from hyper_parallel.inference.kv_cache.tiers import CacheReport
from hyper_parallel.inference.load_model import load, load_shards, load_within
from hyper_parallel.inference.memory_budget import MemoryBudget
from hyper_parallel.inference.model_support import check_length, check_model, longest_text, prove
from hyper_parallel.inference.ragged_pass import BLOCK
from hyper_parallel.inference.rank_groups import Agreement, Replica, context_group, without_context
from hyper_parallel.inference.request import NO_TOKENS, Completion, Request, prompt_ids, row_of
from hyper_parallel.inference.sampler import DecideTogether
from hyper_parallel.inference.weights.tiers import ModelSource
from hyper_parallel.shard.sharded_model import sharded
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.memory import GenerationMemory

log = logging.getLogger(__name__)
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a conversation."""


class Generator:
    """Generates with continuous batching over a paged KV cache.

    generator = Generator("exported/quickstart", max_tokens=40)
    for answer in generator(["def add(a, b):", "class Stack:"]):
        print(answer.text)
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        tokenizer: Any = None,
        *,
        strategy: Strategy | None = None,
        memory: GenerationMemory | Mapping[str, Any] | None = None,
        device: str = "auto",
        **settings: Any,
    ) -> None:
        """`model`: a Transformers model, or a folder: one that `save_pretrained` or `export` wrote, a run's, or a
        checkpoint; or an id of the Hub, `org/name` or `org/name@revision`, which is downloaded. `tokenizer`:
        Transformers' fast tokenizer; a folder has its own. `strategy`: how a folder's model is spread over the ranks of
        the process group, of which each loads its own shards; every rank then makes the Generator and calls it with the
        same prompts. `memory`: a byte budget, the keys of the section `strategy.memory`; until `close` the weights of a
        model in memory belong to the Generator. `device`: the kind of device of a folder's model without a strategy,
        as `launch.device` has it. `settings`: keys of the `inference` section.

        Raises UnsupportedModelError for a model that cannot be generated with, CheckpointError or ConfigError for a
        folder that cannot be read or a budget that is too small, StrategyError for a strategy that does not fit.
        """
        self.settings = inference_settings(settings)
        strategy = _checked(strategy)
        budget = _budget(strategy, memory)
        self.memory: MemoryBudget | None = None
        """The budget at work; None without one."""
        if isinstance(model, nn.Module):
            if strategy is not None:
                raise ConfigError(
                    "strategy: is for a model's folder; spread a model in memory with hp.parallelize(model, strategy)"
                )
            self.model = model
            self.tokenizer = Tokenizer(tokenizer) if tokenizer is not None else None
            check_model(model)
        elif strategy is not None and strategy.axes.world > 1:
            self.model, self.tokenizer = load_shards(_folder(model), without_context(strategy))
        elif budget.device is None:
            self.model, self.tokenizer = load(_folder(model), device)
            column_major(self.model, BLOCK)
        else:
            self.model, self.tokenizer, self.memory = load_within(_folder(model), budget, device)
        self._config = check_model(self.model)
        size = strategy.axes.context if strategy is not None else 1
        self.replica = Replica.of(self.model, size)
        """The workers with which this process computes the same passes."""
        agreement = Agreement(self.replica.group, next(self.model.parameters()).device)
        if budget.device is not None and self.memory is None:
            self.memory = MemoryBudget(
                self.model,
                ModelSource(self.model),
                budget,
                next(self.model.parameters()).device,
                restore=isinstance(model, nn.Module),
                agreement=agreement,
            )
        context = context_group(sharded(self.model), size, self.settings.page) if size > 1 else None
        own: Any = getattr(self.model, "generation_config", None) or self.model.config
        layers, eos = int(self._config.num_hidden_layers), stop_tokens(own, self.tokenizer)
        int8 = self.settings.kv_dtype == "int8"
        self._engine = (
            Engine(self.model, self.settings.page, layers=layers, eos=eos, int8=int8)
            if context is None
            else ContextEngine(self.model, context, layers=layers, eos=eos, int8=int8)
        )
        self._engine.cache.agreement = agreement
        if self.replica.group is not None:
            self._engine.decide = DecideTogether(self.replica.group, self.replica.leads)
        if self.memory is None:
            prove(self._engine, self._config)
        else:
            try:
                self.memory.prove(self._engine, lambda: prove(self._engine, self._config))
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Give back what a budget holds: a model in memory has its weights again, and files are removed. A Generator
        without a budget has nothing to close."""
        self._engine.cache.close()
        if self.memory is not None:
            self.memory.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, prompts: Sequence[Prompt], **settings: Any) -> list[Completion]:
        """Completions in the order of the prompts, `n` to each in turn. `settings` replace those of the generator;
        `page` and `kv_dtype` are its own."""
        found = dict(self.stream(prompts, **settings))
        return [found[place] for place in range(len(found))]

    def stream(self, prompts: Sequence[Prompt], **settings: Any) -> Iterator[tuple[int, Completion]]:
        """Place and completion, as they are ready; completion k of prompt i has the place i · n + k."""
        requests, chosen = self._requests(prompts, settings)
        yield from self.run(requests, chosen)

    def smallest_budget(self, prompts: Sequence[Prompt], **settings: Any) -> int:
        """The smallest `memory.device`, in bytes, with which these prompts are answered. For a Generator that has a
        budget."""
        if self.memory is None:
            raise ConfigError("this Generator has no memory budget; give it memory={'device': ...}")
        return self.memory.smallest(self._engine, *self._requests(prompts, settings))

    def _requests(
        self, prompts: Sequence[Prompt], settings: Mapping[str, Any]
    ) -> tuple[list[Request], Inference]:
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
            raise DataError("prompts are a list, also of one: generator([prompt])")
        chosen = inference_settings({**self.settings.model_dump(), **settings})
        self._check_pages(chosen)
        ids = [self.ids_of(one, settings=chosen) for one in prompts]
        return [self.request(one, chosen, sample) for one in ids for sample in range(chosen.n)], chosen

    def pinned(self, prompts: Sequence[Prompt]) -> AbstractContextManager[None]:
        """A context in which the pages that these beginnings of prompts fill stay on the device, from run to run and
        whatever else needs memory; the first request that begins with one computes it. A budget has room for them.

        Raises ConfigError for a beginning that fills no page, and for a budget that is too small.
        """
        return pinned_prompts(self._engine, *self._requests(prompts, {"max_tokens": 1, "n": 1}))

    def moved(self) -> str:
        """Bytes that were moved between memories until now, in words; empty where nothing was."""
        parts = [self.memory.report if self.memory is not None else ""]
        if cache := self.cache_report.progress():
            parts.append(f"keys and values: {cache}")
        return "; ".join(filter(None, parts))

    @property
    def cache_report(self) -> CacheReport:
        """Figures of the KV cache, of the run under way or the last one; bytes since its tiers were opened."""
        return self._engine.cache.report

    @property
    def unused_tiers(self) -> tuple[str, ...]:
        """Tiers of the budget that nothing has been moved to."""
        return () if self.memory is None else self.memory.unused(self.cache_report)

    @property
    def shared(self) -> int:
        """Tokens of the prompts of the last run that were not computed, since another request had computed them, on the
        device or in tiers."""
        report = self.cache_report
        return report.shared + report.fetched

    @property
    def passes(self) -> int:
        """Passes through the model until now."""
        return self._engine.passes

    @contextmanager
    def around_passes(self, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Inside, each pass of a run is computed in a context that `around` gives."""
        before, self._engine.around_pass = self._engine.around_pass, around
        try:
            yield
        finally:
            self._engine.around_pass = before

    def run(
        self, requests: Sequence[Request], settings: Inference | None = None
    ) -> Iterator[tuple[int, Completion]]:
        """Each request's place and completion, as they are ready. Each is drawn as it says itself."""
        chosen = settings or self.settings
        self._check_pages(chosen)
        yield from self._engine.run(requests, chosen, self.text_of)

    def _check_pages(self, settings: Inference) -> None:
        """Raise ConfigError for other pages than those of this Generator, which would be ignored."""
        own = self.settings
        if settings.page != own.page:
            raise ConfigError(f"page: this Generator's pages have {own.page} tokens; make another one")
        if settings.kv_dtype != own.kv_dtype:
            raise ConfigError(
                f"kv_dtype: this Generator's pages hold {own.kv_dtype or 'the dtype of the model'}; make another one"
            )

    def request(self, ids: Sequence[int], settings: Inference, sample: int = 0) -> Request:
        """A request for answer number `sample` to a prompt.

        Raises UnsupportedModelError for one that is longer than the model reads, DataError for a token that it does not
        have.
        """
        most = longest_text(self._config)
        sampling = settings.sampling(None if most is None else most - len(ids))
        check_length(self._config, len(ids) + sampling.max_tokens)
        if not 0 <= min(ids) <= max(ids) < self._config.vocab_size:
            raise DataError(
                f"the prompt has token {max(ids) if min(ids) >= 0 else min(ids)}, and the model's vocabulary has "
                f"{self._config.vocab_size}"
            )
        return Request(ids=tuple(ids), sampling=sampling, seed=settings.seed, row=row_of(ids), sample=sample)

    def ids_of(
        self, prompt: Prompt, options: Mapping[str, Any] | None = None, *, settings: Inference | None = None
    ) -> list[int]:
        """Token ids of a prompt. `options`: what the chat template gets beside messages. Raises DataError for a prompt
        without tokens, or one that needs a tokenizer and has none."""
        if not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int)):
            if not prompt:
                raise DataError(NO_TOKENS)
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise DataError("there is no tokenizer; give token ids, or a folder with tokenizer.json")
        special = (settings or self.settings).special_tokens_in_text
        return prompt_ids(self.tokenizer, prompt, options, special_tokens=special)  # type: ignore[arg-type]

    def text_of(self, ids: list[int], special: bool = False) -> str:
        """The text of an answer's tokens, special ones left out or (`special`) by their names; empty without a
        tokenizer."""
        return self.tokenizer.decode(ids, special) if self.tokenizer is not None else ""


def _budget(
    strategy: Strategy | None, memory: GenerationMemory | Mapping[str, Any] | None
) -> GenerationMemory:
    """The budget of one or the other."""
    given = GenerationMemory() if strategy is None else budget_of(strategy)
    if memory is None:
        return given
    if given != GenerationMemory():
        raise ConfigError("memory: 'strategy' has a section 'memory', too; give one of them")
    return memory if isinstance(memory, GenerationMemory) else generation_memory(memory)


def _folder(model: str | Path) -> Path:
    """The folder that is named, or that of an id of the Hub in its cache."""
    found = parse(model, "model") if isinstance(model, str) else None
    return (
        Path(model) if found is None else fetched_folder(pinned(found, Wanted.MODEL, "model", tell=log.info))
    )


def _checked(strategy: Strategy | None) -> Strategy | None:
    """Raises ConfigError for one with what generation does not use."""
    if strategy is not None:
        try:
            check_strategy(strategy)
        except ValueError as error:
            raise ConfigError(f"strategy: {error}") from None
    return strategy


# Pinned prompts: the pages that beginnings of prompts fill stay on the device, whatever else needs memory.
#
# A page is computed by the first request that begins with it, and is counted beside the pages that requests need
# (`KVCacheSizes.pinned`), so that what is pinned takes no memory from them.


@contextmanager
def pinned_prompts(engine: Engine, requests: Sequence[Request], settings: Inference) -> Iterator[None]:
    """Inside, the prompts of these requests are pinned. Raises ConfigError for one that fills no page, for pages that
    are not shared, and for a budget that is too small."""
    page, cache = engine.page, engine.cache
    if not settings.prefix_cache:
        raise ConfigError(
            "pinned: inference.prefix_cache is false, and prompts share no pages then; leave it out"
        )
    if short := [len(one.ids) for one in requests if len(one.ids) < page]:
        raise ConfigError(
            f"pinned: {short[0]} tokens fill no page of {page} tokens; pin a longer beginning, or lower inference.page"
        )
    cache.check_idle()
    keys = {key for one in requests for key in filled_keys(one.ids, page)}
    cache.pin(keys)
    try:
        if engine.fit is not None:
            engine.fit(engine, requests, settings)
        yield
    finally:
        cache.unpin(keys)
