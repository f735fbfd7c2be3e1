"""Models of the roles on a worker, as a run declares them: policy, rollout and reward model, and the tokenizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.config.model import ModelConfig
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.config.rl_roles import RewardRole
from hyper_parallel.data import Tokenizer
from hyper_parallel.data.chat import conversation
from hyper_parallel.data.document import Chat
from hyper_parallel.data.generation_settings import generation_settings, stop_tokens
from hyper_parallel.data.tokenizer import character_tokenizer
from hyper_parallel.data.tokenizer import load as load_tokenizer
from hyper_parallel.errors import ConfigError, DataError, UnsupportedModelError
from hyper_parallel.inference.blocked_products import column_major
from hyper_parallel.inference.ragged_pass import BLOCK
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.tasks import VOCABULARY
from hyper_parallel.shard import ShardedModel, init_weights, load_weights, parallelize, sharded
from hyper_parallel.shard.forward import inference
from hyper_parallel.shard.lora_adapters import adapted_layers, base_of, name_in_base
from hyper_parallel.shard.parallelize import Lowering
from hyper_parallel.shard.plan.plan import length_multiple
from hyper_parallel.step.adapters import with_adapters
from hyper_parallel.step.build import causal_model, transformers_config
from hyper_parallel.strategy import Memory, Precision, Strategy


def tokenizer_of(config: RLConfig) -> Tokenizer:
    """That of the model's folder, or one of characters. Raises DataError."""
    if config.model.folder is not None:
        return load_tokenizer(config.model.folder, "model.path")
    return Tokenizer(character_tokenizer(config.characters or VOCABULARY))


def policy_on_meta(config: RLConfig, tokenizer: Tokenizer, dtype: torch.dtype) -> nn.Module:
    """The model without values. Raises ConfigError for one that Transformers cannot build, or that does not have the
    tokenizer's tokens."""
    hf = _transformers_config(config, tokenizer)
    return causal_model(hf, dtype, _attention(config), config.model.folder)


def plain_policy(
    config: RLConfig, tokenizer: Tokenizer, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Transformers' own model on one device, with values that mean nothing until weights arrive. Raises as
    `policy_on_meta`."""
    from transformers import AutoModelForCausalLM

    hf = _transformers_config(config, tokenizer)
    # Raises what is wrong with it, in one line, and unties a head that the folder has for itself.
    causal_model(hf, dtype, _attention(config), config.model.folder)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            hf, dtype=dtype, attn_implementation=_attention(config), trust_remote_code=False
        )
    return model


def _attention(config: RLConfig) -> str | None:
    return None if config.model.attention == "auto" else config.model.attention


def _transformers_config(config: RLConfig, tokenizer: Tokenizer) -> Any:
    hf = transformers_config(config.model)
    if config.model.path is None:
        given = config.model.config or {}
        if "vocab_size" not in given:
            hf.vocab_size = tokenizer.vocab_size
        for key, value in (
            ("bos_token_id", tokenizer.eos),
            ("eos_token_id", tokenizer.eos),
            ("pad_token_id", None),
        ):
            if key not in given:
                setattr(hf, key, value)
    if hf.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model: vocab_size is {hf.vocab_size}, and the tokenizer has {tokenizer.vocab_size} tokens; leave "
            "vocab_size out, or make it as large"
        )
    return hf


def trained_policy(
    config: RLConfig,
    tokenizer: Tokenizer,
    strategy: Strategy,
    device: torch.device,
    *,
    adapted: bool = True,
    lowering: Lowering = "fsdp",
    like: ShardedModel | None = None,
    filled: bool = True,
) -> nn.Module:
    """The parallelized model with its values, on every rank; with the run's adapters unless not `adapted`, and without
    values unless `filled`. `lowering`, `like`: as of `parallelize`. Raises StrategyError besides, and ConfigError for
    adapters that do not fit the model."""
    model = policy_on_meta(config, tokenizer, getattr(torch, strategy.precision.param))
    if adapted and config.model.adapter is not None:
        model = with_adapters(model, config.model.adapter)
        _refuse_tied(model)
    model = parallelize(model, strategy, lowering=lowering, like=like)
    if filled:
        fill(model, config, device)
    return model


def _refuse_tied(model: nn.Module) -> None:
    """Raise ConfigError for an adapter on a weight that the model has in two places: a rollout has it once."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in adapted_layers(model):
        if uses[base_of(layer).weight] > 1:  # type: ignore[index]
            raise ConfigError(
                f"model.adapter.targets: the weight of {name_in_base(name, model)!r} is tied to another one, and a "
                "rollout has both as one; leave it out of targets"
            )


def fill(model: nn.Module, config: RLConfig, device: torch.device) -> None:
    """Give a parallelized model on the meta device its values: the folder's, or new ones of the run's seed."""
    if config.model.folder is not None:
        load_weights(model, config.model.folder, device, config.seed)
    else:
        init_weights(model, config.seed, device)


def ends_of(model: Any, tokenizer: Tokenizer, folder: str | None) -> frozenset[int]:
    """The tokens that end an answer, as `Generator` has them for the folder."""
    return stop_tokens(generation_settings(folder, model.config), tokenizer)


def rollout_model(config: RLConfig, tokenizer: Tokenizer, device: torch.device) -> nn.Module:
    """In the dtype in which the actor computes, parallelized over the ranks of one copy. Raises what building does."""
    given, one = config.roles.rollouts.spread, config.roles.actor.strategy.precision.compute
    dtype = getattr(torch, one)
    if given.world == 1:
        model = plain_policy(config, tokenizer, dtype, device)
        column_major(model, BLOCK)
        return model.eval()
    model = policy_on_meta(config, tokenizer, dtype)
    strategy = Strategy(
        axes=given.axes, placement=given.placement, rules=given.rules, check=given.check
    ).model_copy(update={"precision": Precision(param=one, compute=one, reduce=one), "memory": Memory()})
    parallelize(model, strategy)
    fill(model, config, device)
    return model.eval()


# The reward model: Transformers' sequence classifier of one label scores answers, on each rank of its group.
#
#     score = w · h_t     h_t [H]: the last layer's output at a row's last token; w [H]: the head `score`
#
# A row is a prompt and its answer as the model's own tokenizer encodes them: a conversation through its chat template,
# a text as it is. The last token is the last one that is not the config's padding token, as in Transformers' own
# pooling; but rows are padded on the right with any token, since what follows a token does not reach it in a decoder.

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
