"""The reward model: Transformers' sequence classifier of one label scores answers, on each rank of its group.

    score = w · h_t     h_t [H]: the last layer's output at a row's last token; w [H]: the head `score`

A row is a prompt and its answer as the model's own tokenizer encodes them: a conversation through its chat template, a
text as it is. The last token is the last one that is not the config's padding token, as in Transformers' own pooling;
but rows are padded on the right with any token, since what follows a token does not reach it in a decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.config.model import ModelConfig
from hyper_parallel.config.rl_role import RewardRole
from hyper_parallel.data.chat import conversation
from hyper_parallel.data.document import Chat
from hyper_parallel.data.tokenizer import load as load_tokenizer
from hyper_parallel.errors import ConfigError, DataError, UnsupportedModelError
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.shard import load_weights, parallelize, sharded
from hyper_parallel.shard.no_grad_forward import inference
from hyper_parallel.shard.row_length import length_multiple
from hyper_parallel.step.build import transformers_config

KEY = "roles.reward.model"
"""Of the folder in the run file."""


class RewardModel:
    """The reward model on this rank. Every rank of the group is given the same calls."""

    def __init__(self, role: RewardRole, device: torch.device) -> None:
        """`role`: with its devices and strategy filled in. Raises UnsupportedModelError for a folder without a head of
        one label, ConfigError, DataError, StrategyError or CheckpointError for one that cannot be loaded."""
        self._role, self._device = role, device
        config = _config_of(role.folder)
        text: Any = config.get_text_config(decoder=True)
        self.tokenizer = load_tokenizer(role.folder, KEY)
        if text.vocab_size < self.tokenizer.vocab_size:
            raise ConfigError(
                f"{KEY}: the model of {role.model} has {text.vocab_size} tokens, and its tokenizer "
                f"{self.tokenizer.vocab_size}; put the tokenizer that belongs to the weights into the folder"
            )
        self._padding: int | None = text.pad_token_id
        if self._padding is None:
            # Without one Transformers' pooling, whose result is not used, refuses several rows.
            text.pad_token_id = -1
        positions = getattr(text, "max_position_embeddings", None)
        self._longest = min(role.max_length or math.inf, positions or math.inf)
        self.model = _on_meta(config, role)
        parallelize(self.model, role.spread)
        load_weights(self.model, role.folder, device)
        self._outputs: list[Tensor] = []
        """What the head gave in a forward pass, [B, S, 1]."""
        self.model.get_submodule("score").register_forward_hook(
            lambda module, given, output: self._outputs.append(output)
        )

    def scores(self, groups: Sequence[Sequence[tuple[Prompt, str]]]) -> list[list[float | None]]:
        """Of answers behind their prompts, on every rank. A score depends on the answers of its own group only, to the
        bit: forward passes have answers of one group each. None: the row is too long, or its score is not finite.

        A collective. Raises DataError for messages that the chat template does not take, and for a text that the
        tokenizer has no tokens for.
        """
        with inference(self.model):
            return [self._of_group([self._row(*one) for one in group]) for group in groups]

    def _row(self, prompt: Prompt, answer: str) -> list[int]:
        """The token ids of a prompt and an answer."""
        if isinstance(prompt, str):
            ends = [self.tokenizer.eos] if self._role.append_eos else []
            return self._encoded(self.tokenizer.encode, prompt + answer) + ends
        said: list[Mapping[str, Any]] = [*prompt, {"role": "assistant", "content": answer}]
        text = conversation(self.tokenizer.transformers, Chat(KEY, [dict(one) for one in said]))
        return self._encoded(lambda one: self.tokenizer.encode_template([one])[0][0], text)

    def _encoded(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        try:
            return encode(text)
        except Exception as error:  # the library's Rust part raises plain ones
            raise DataError(
                f"{KEY}: the tokenizer of {self._role.model} has no tokens for {text!r:.80}: {error}; give a model "
                "whose tokenizer takes every text"
            ) from error

    def _of_group(self, rows: Sequence[Sequence[int]]) -> list[float | None]:
        """Of rows of token ids, of like lengths together."""
        handle = sharded(self.model)
        ranks = handle.mesh.size("replicate") * handle.mesh.size("shard")
        order = sorted(
            (place for place, row in enumerate(rows) if 0 < len(row) <= self._longest),
            key=lambda place: len(rows[place]),
        )
        found = torch.zeros(len(rows), device=handle.device)
        for at in range(0, len(order), ranks * self._role.batch):
            places = order[at : at + ranks * self._role.batch]
            # Every rank has as many rows; one without rows of its own computes the longest, which is another's.
            dealt = places + places[-1:] * (-len(places) % ranks)
            own = range(handle.data_index, len(dealt), ranks)
            values = self._forward([rows[dealt[place]] for place in own], len(rows[places[-1]]))
            for place, value in zip(own, values, strict=True):
                if place < len(places):
                    found[places[place]] = value
        scores = handle.all_reduce(found, ("replicate", "shard")).tolist()
        known = set(order)
        return [
            score if place in known and math.isfinite(score) else None for place, score in enumerate(scores)
        ]

    def _forward(self, rows: Sequence[Sequence[int]], longest: int) -> Tensor:
        """fp32 [B]: the scores of B rows."""
        multiple = length_multiple(sharded(self.model).plan)
        ids = torch.zeros(len(rows), -(-longest // multiple) * multiple, dtype=torch.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        last = torch.tensor([self._last(row) for row in rows], device=self._device)
        self._outputs.clear()
        self.model(ids.to(self._device), use_cache=False)
        [output] = self._outputs
        self._outputs.clear()
        return output[torch.arange(len(rows), device=self._device), last, 0].float()

    def _last(self, row: Sequence[int]) -> int:
        """The place of the token whose output is the score; the first where all are padding."""
        return next((place for place in reversed(range(len(row))) if row[place] != self._padding), 0)


def _config_of(folder: str) -> Any:
    """Transformers' config of a folder whose head has one label."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    try:
        config = transformers_config(ModelConfig(path=folder))
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", KEY)) from error
    mend = "give a decoder that was trained with AutoModelForSequenceClassification and num_labels=1"
    named = getattr(config, "architectures", None) or []
    if named and not any("ForSequenceClassification" in one for one in named):
        raise UnsupportedModelError(f"{KEY}: {folder} is a {named[0]}, which gives no score; {mend}")
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UnsupportedModelError(f"{KEY}: Transformers scores no text with {config.model_type}; {mend}")
    if config.num_labels != 1:
        raise UnsupportedModelError(f"{KEY}: the head of {folder} has {config.num_labels} labels; {mend}")
    return config


def _on_meta(config: Any, role: RewardRole) -> nn.Module:
    """The model without values."""
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(
                config, dtype=getattr(torch, role.spread.precision.param), trust_remote_code=False
            )
    except Exception as error:  # what its classes make of a field of another type or size is of any kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{KEY}: Transformers cannot build the model of {role.model}: {reason}") from error
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UnsupportedModelError(
            f"{KEY}: {type(model).__name__} of {role.model} has no head 'score' behind its last token, as decoders "
            "have; give a Llama, Qwen or other decoder with num_labels=1"
        )
    assert isinstance(model, nn.Module)
    return model
