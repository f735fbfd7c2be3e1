"""`Generator`: answers to prompts, from a model in memory or in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.config.inference import Inference
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.chat import prompt as render
from hyper_parallel.data.document import Chat
from hyper_parallel.errors import DataError
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.load_model import load
from hyper_parallel.inference.model_support import check_length, check_model, prove
from hyper_parallel.inference.request import Answer, Request

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a conversation."""


class Generator:
    """Generates with continuous batching over a paged KV cache.

    generator = Generator("exported/quickstart", max_tokens=40)
    for answer in generator(["def add(a, b):", "class Stack:"]):
        print(answer.text)
    """

    def __init__(self, model: nn.Module | str | Path, tokenizer: Any = None, **settings: Any) -> None:
        """`model`: a Transformers model, or a folder: one that `save_pretrained` or `export` wrote, a run's, or a
        checkpoint. `tokenizer`: Transformers' fast tokenizer; a folder has its own. `settings`: keys of the `inference`
        section.

        Raises UnsupportedModelError for a model that cannot be generated with, CheckpointError or ConfigError for a
        folder that cannot be read.
        """
        self.settings = Inference(**settings)
        if isinstance(model, nn.Module):
            self.model = model
            self.tokenizer = Tokenizer(tokenizer) if tokenizer is not None else None
        else:
            self.model, self.tokenizer = load(Path(model))
        self._config = check_model(self.model)
        self._engine = Engine(
            self.model,
            self.settings,
            layers=int(self._config.num_hidden_layers),
            eos=_ends(self.model, self.tokenizer),
        )
        prove(self._engine, self._config)

    def __call__(self, prompts: Sequence[Prompt], **settings: Any) -> list[Answer]:
        """Answers in the order of the prompts, `n` to each in turn. `settings` replace those of the generator."""
        found = dict(self.stream(prompts, **settings))
        return [found[place] for place in range(len(found))]

    def stream(self, prompts: Sequence[Prompt], **settings: Any) -> Iterator[tuple[int, Answer]]:
        """Place and answer, as answers are ready; answer k to prompt i has the place i · n + k."""
        chosen = self.settings if not settings else Inference(**{**self.settings.model_dump(), **settings})
        requests = self.requests([self.ids_of(one) for one in prompts], chosen)
        self._engine.settings = chosen
        yield from self.run(requests)

    @property
    def shared(self) -> int:
        """Tokens of the prompts of the last run that were not computed, since another request had computed them."""
        return self._engine.shared

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Each request's place and answer, as answers are ready."""
        yield from self._engine.run(requests, self.text_of)

    def requests(
        self, ids: Sequence[Sequence[int]], settings: Inference, rows: Sequence[int] | None = None
    ) -> list[Request]:
        """Requests for prompts. `rows`: the prompts' places in a larger input, which decide the random numbers."""
        sampling = settings.sampling()
        places = range(len(ids)) if rows is None else rows
        for one in ids:
            check_length(self._config, len(one) + sampling.max_tokens)
            if not 0 <= min(one) <= max(one) < self._config.vocab_size:
                raise DataError(
                    f"the prompt has token {max(one) if min(one) >= 0 else min(one)}, and the model's vocabulary has "
                    f"{self._config.vocab_size}"
                )
        return [
            Request(ids=tuple(one), sampling=sampling, seed=settings.seed, sample=row * settings.n + sample)
            for row, one in zip(places, ids, strict=True)
            for sample in range(settings.n)
        ]

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises DataError for an empty one, or one that needs a tokenizer and has none."""
        if not prompt:
            raise DataError("the prompt is empty; generation needs at least one token to go on from")
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise DataError("there is no tokenizer; give token ids, or a folder with tokenizer.json")
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        question = render(self.tokenizer.transformers, Chat("messages", list(prompt)))  # type: ignore[arg-type]
        return self.tokenizer.encode_template([question])[0][0]

    def text_of(self, ids: list[int]) -> str:
        """The text of an answer's tokens; empty without a tokenizer."""
        return self.tokenizer.decode(ids) if self.tokenizer is not None else ""


def _ends(model: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end an answer: those of the generation config, else of the config, and the tokenizer's own."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if own is None:
        own = getattr(model.config, "eos_token_id", None)
    ids = own if isinstance(own, list | tuple) else [] if own is None else [own]
    return frozenset(map(int, [*ids, *([tokenizer.eos] if tokenizer is not None else [])]))
