"""Context parallelism for a loop that cuts rows itself: LlamaFactory's main branch.

That loop repeats each batch on `cp_size` neighbouring ranks, cuts it with `shard_inputs_for_cp`, and calls the model
with the cut inputs and whole labels. HyperParallel's model takes whole rows and deals their positions itself, so that
each rank has as much work under causal attention, with labels shifted first. So what was cut remembers the rows that it
was cut from, and the call of the model goes back to them.

A call with labels under autograd returns the loss alone: all of the rows' loss ÷ `num_items_in_batch` (left out, their
valid tokens), the same on each rank of the context axis. A call without labels returns whole logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel.compat.process_groups import gather_objects
from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.batch_rows import rows_of
from hyper_parallel.platform import get_platform
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.forward import documents_known
from hyper_parallel.shard.loss import causal_lm_loss, valid_tokens

_whole: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What `shard_inputs_for_cp` cut to the inputs that it was cut from."""


def get_cp_rank(hp_args: Any) -> int:
    """The index of the part of a row that this rank computes: ranks that share rows are neighbours."""
    return get_platform().get_rank() % int(hp_args.cp_size)


def get_dp_rank(hp_args: Any) -> int:
    """The index of the share of the batch that this rank computes."""
    return get_platform().get_rank() // int(hp_args.cp_size)


def get_cp_group_ranks(hp_args: Any) -> tuple[int, ...]:
    """The ranks that compute on the same rows as this one, in order."""
    size, share = int(hp_args.cp_size), get_dp_rank(hp_args)
    return tuple(range(share * size, (share + 1) * size))


def get_cp_group(hp_args: Any) -> dist.ProcessGroup | None:
    """Their process group; None where nothing is split. A collective of all ranks the first time."""
    size = int(hp_args.cp_size)
    return _groups(size)[get_dp_rank(hp_args)] if size > 1 else None


@functools.cache
def _groups(size: int) -> tuple[dist.ProcessGroup, ...]:
    world = get_platform().get_world_size()
    if world % size:
        raise IntegrationError(
            f"cp_size {size} does not divide the number of workers, {world}; start a multiple of {size} workers"
        )
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return tuple(groups)


def cp_prepare_model(model: nn.Module, accelerator: Any, hp_args: Any) -> nn.Module:
    """See whether the model's positions can be split; `fsdp2_prepare_model`, called after it, splits them.

    Returns the model. Raises IntegrationError, before anything is changed, where they cannot.
    """
    if int(hp_args.cp_size) > 1:
        from hyper_parallel.integration.trainer_arguments import has_next_token_loss

        _groups(int(hp_args.cp_size))
        if not has_next_token_loss(model):
            raise IntegrationError(
                f"cp_size splits positions, and {type(model).__name__} computes another loss than that of the next "
                "token, which is not known to be a sum over them; set cp_size to 1"
            )
    return model


def shard_inputs_for_cp(inputs: Mapping[str, Any], cp_rank: int, cp_size: int) -> dict[str, Any]:
    """The inputs of one rank of `cp_size`: input_ids [B, S], inputs_embeds [B, S, D] and position_ids [.., S] cut to
    S / cp_size positions, a 4-D mask [B, 1, S, S] to as many queries. Labels and a 2-D mask stay whole.

    A length that `cp_size` does not divide is padded at the end. Raises IntegrationError where there are no rows.
    """
    if cp_size <= 1:
        return dict(inputs)
    main = next((key for key in ("input_ids", "inputs_embeds") if isinstance(inputs.get(key), Tensor)), None)
    if main is None or inputs[main].dim() < 2:
        raise IntegrationError(
            f"a batch without input_ids [rows, positions] cannot be split over cp_size {cp_size}; it has "
            f"{', '.join(inputs) or 'nothing'}"
        )
    length = inputs[main].size(1)
    part = -(-length // cp_size)
    cut = dict(inputs)
    for key, dim in (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", -1), ("attention_mask", -2)):
        value = inputs.get(key)
        if isinstance(value, Tensor) and (key != "attention_mask" or value.dim() == 4):
            cut[key] = _part(value, dim, part, cp_rank, cp_size)
    _whole[cut[main]] = dict(inputs)
    return cut


def _part(x: Tensor, dim: int, part: int, index: int, parts: int) -> Tensor:
    missing = part * parts - x.size(dim)
    if missing:
        behind = x.dim() - 1 - dim % x.dim()
        x = pad(x, [0, 0] * behind + [0, missing])
    return x.narrow(dim, index * part, part).contiguous()


class LossAlone(dict[str, Tensor]):
    """The output of a model whose loss is computed in parts: `loss`, and nothing else that could be asked for."""

    @property
    def loss(self) -> Tensor:
        """Zero-dim: the rows' loss."""
        return self["loss"]

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict, but what other models return and this one does not is an error."""
        return self[key] if key in self else self.__missing__(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__missing__(name)

    def __missing__(self, key: str) -> Any:
        if key == "aux_loss":
            return None
        raise IntegrationError(
            f"with cp_size above 1 a call with labels computes the loss in parts and returns no {key}; a loss that "
            "needs them beside the labels (ASFT) needs cp_size 1"
        )


def call_with_positions_split(
    call: Callable[..., Any], handle: ShardedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call of a model whose positions are split, with what `shard_inputs_for_cp` cut, or with whole rows.

    Rows that were not cut may be others on each rank of the context axis, as an evaluation's are: they are computed in
    turns, each by all of these ranks. Raises IntegrationError for rows that were not cut under autograd.
    """
    given = {**({"input_ids": args[0]} if args else {}), **kwargs}
    main = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if len(args) > 1 or not isinstance(main, Tensor):
        raise IntegrationError("with cp_size above 1 give the model its inputs by name, input_ids among them")
    whole = _whole.get(main)
    if whole is not None:
        return _call_with_rows(call, handle, {key: whole.get(key, value) for key, value in given.items()})
    if torch.is_grad_enabled():
        raise IntegrationError(
            "with cp_size above 1 the model was called with rows that were not split; split every training batch "
            "with shard_inputs_for_cp(inputs, cp_rank, cp_size)"
        )
    return _call_in_turns(call, handle, given)


def _call_with_rows(call: Callable[..., Any], handle: ShardedModel, given: dict[str, Any]) -> Any:
    """One call on whole rows, which are the same on each rank of the context axis."""
    if given.get("input_ids") is None:
        raise IntegrationError(
            "with cp_size above 1 rows are given as input_ids; inputs_embeds are not supported"
        )
    count = given.pop("num_items_in_batch", None)
    for key in ("past_key_values", "use_cache"):
        if given.pop(key, None):
            raise IntegrationError(
                f"with cp_size above 1 whole rows are computed and no cache is kept, but {key} was given; generate "
                "(predict_with_generate) with cp_size 1"
            )
    rows = rows_of(given, handle)
    if rows.labels is not None and torch.is_grad_enabled():
        tokens = valid_tokens(rows.labels).clamp(min=1) if count is None else count
        with documents_known(rows.several):
            part = causal_lm_loss(
                handle.model, rows.input_ids, rows.labels, rows.position_ids, tokens, **rows.rest
            )
        # The ranks' parts: the sum goes out, and back to each its own.
        return LossAlone(loss=handle.axes["context"].reduce(part))
    labels = {}
    if rows.labels is not None:
        labels = {"labels": rows.labels, "shift_labels": rows.labels, "num_items_in_batch": count}
    positions = {} if rows.position_ids is None else {"position_ids": rows.position_ids}
    with documents_known(rows.several):
        output = call(input_ids=rows.input_ids, use_cache=False, **positions, **labels, **rows.rest)
    # Losses of a caller's take views of them.
    output["logits"] = output["logits"][:, : rows.length].contiguous()
    return output


def _call_in_turns(call: Callable[..., Any], handle: ShardedModel, given: dict[str, Any]) -> Any:
    axis = handle.axes["context"]
    mine, group = axis.index(handle.rank), _groups(axis.size)[handle.rank // axis.size]
    device = next(x.device for x in given.values() if isinstance(x, Tensor))
    every = gather_objects(_moved(given, torch.device("cpu")), group)
    kept = None
    for index, theirs in enumerate(every):
        output = _call_with_rows(call, handle, _moved(theirs, device))
        if index == mine:
            kept = output
    return kept


def _moved(given: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: x.to(device) if isinstance(x, Tensor) else x for key, x in given.items()}
