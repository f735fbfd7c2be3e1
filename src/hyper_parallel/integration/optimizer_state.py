"""The state of a torch optimizer in a checkpoint: moments that reshard, and the rest as JSON.

A tensor of the state with an element for each one of the parameter is laid out as the parameter and is saved as
``optimizer.<key>.<parameter>`` (``optimizer.exp_avg.model.norm.weight``), as our own trainer names its moments.
Counts of updates and settings of groups are JSON, by the parameters' names: groups may be cut up otherwise under
another strategy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hyper_parallel.checkpoint import Piece, Ranks
from hyper_parallel.checkpoint.reader import Checkpoint
from hyper_parallel.checkpoint.shard import dtype_name
from hyper_parallel.errors import CheckpointError, IntegrationError
from hyper_parallel.integration.local_optimizer import Twin, Twins, find_twins, settings_of
from hyper_parallel.layout import Layout

OPTIMIZER = "optimizer."
"""What the names of an optimizer's tensors begin with in a checkpoint."""


@dataclass(frozen=True)
class _State:
    """The state that an optimizer keeps for one parameter."""

    tensors: dict[str, Tensor]
    """What is saved as pieces."""
    rest: dict[str, Any]
    """What is JSON."""

    def __bool__(self) -> bool:
        return bool(self.tensors or self.rest)


def collect(optimizer: Any, ranks: Ranks) -> tuple[dict[str, Piece], dict[str, Any]]:
    """The optimizer's tensors by their names in a checkpoint, and the JSON beside them. A collective.

    Raises IntegrationError when the state holds what is neither laid out as its parameter nor JSON.
    """
    inner, twins = _on_local(optimizer)
    held = {twin.name: _state(twin, inner.state.get(twin.tensor) or {}) for twin in twins.owned}
    states = _completed(twins, held, ranks)
    pieces: dict[str, Piece] = {}
    for twin in twins.owned:
        for key, value in states[twin.name].tensors.items():
            same = value.shape == twin.tensor.shape
            pieces[f"{OPTIMIZER}{key}.{twin.name}"] = Piece(
                value, _layout(twin, None if same else value.shape), twins.handle.owners(twin.name)
            )
    groups = [
        {
            "settings": {key: _json(value) for key, value in settings_of(group).items()},
            "parameters": [twin.name for twin in twins.of(group)],
        }
        for group in inner.param_groups
    ]
    rest = {name: state.rest for name, state in states.items() if state}
    if twins.handle.pipeline is not None:
        # Rank 0 writes it for the stages of all ranks.
        parts = [json.loads(text) for text in ranks.gather(json.dumps(rest))]
        rest = {name: state for part in parts for name, state in part.items()}
    return pieces, {"name": type(inner).__name__, "groups": groups, "state": rest}


def restore(optimizer: Any, checkpoint: Checkpoint, saved: dict[str, Any]) -> None:
    """Fill an optimizer with what `collect` gave, under any other strategy; every element and setting as it was.

    Raises CheckpointError when it was saved by another optimizer or for other parameters, or is damaged.
    """
    inner, twins = _on_local(optimizer)
    if saved["name"] != type(inner).__name__:
        raise CheckpointError(
            f"{checkpoint.path} holds the state of {saved['name']}, and this run has {type(inner).__name__}; resume "
            "with the same optimizer ('optim')"
        )
    named = {twin.name: twin for twin in twins}
    away = named.keys() - {twin.name for twin in twins.owned}
    pieces: dict[str, Piece] = {}
    elsewhere: set[str] = set()
    state: dict[str, dict[str, Any]] = {
        name: {key: _value(value) for key, value in rest.items()}
        for name, rest in saved["state"].items()
        if name not in away
    }
    for name, tensor in checkpoint.tensors.items():
        key, _, parameter = name.removeprefix(OPTIMIZER).partition(".")
        twin = named.get(parameter)
        if not name.startswith(OPTIMIZER) or twin is None:
            continue
        if parameter in away:
            elsewhere.add(name)
            continue
        layout = _layout(twin, None if tensor.shape == twin.layout.shape else tensor.shape)
        shape = layout.local_shape(twins.handle.coordinate)
        value = torch.zeros(shape, dtype=tensor.dtype, device=twin.tensor.device)
        pieces[name] = Piece(value, layout, twins.handle.owners(parameter))
        state.setdefault(parameter, {})[key] = value
    # What is left over, or of another shape, is an error that names it.
    checkpoint.match(pieces, OPTIMIZER, elsewhere)
    checkpoint.fill(pieces, twins.handle.rank)
    settings = {name: group["settings"] for group in saved["groups"] for name in group["parameters"]}
    empty = inner.state_dict()
    filled: dict[int, dict[str, Any]] = {}
    for group, listed in zip(inner.param_groups, empty["param_groups"], strict=True):
        members = twins.of(group)
        for index, twin in zip(listed["params"], members, strict=True):
            if state.get(twin.name):
                filled[index] = state[twin.name]
        listed.update(_settings(members, settings, checkpoint))
    inner.load_state_dict({"state": filled, "param_groups": empty["param_groups"]})


def _on_local(optimizer: Any) -> tuple[Optimizer, Twins]:
    inner, twins = find_twins(optimizer)
    assert twins is not None, "on_local comes before saving and loading"
    return inner, twins


def _layout(twin: Twin, shape: tuple[int, ...] | None) -> Layout:
    """The parameter's, or for a tensor of another shape, which only optimizers on whole parameters have, all of it."""
    return twin.layout if shape is None else Layout.replicated(twin.layout.mesh, shape)


def _state(twin: Twin, state: dict[str, Any]) -> _State:
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    split = any(twin.layout.mesh.size(axis) > 1 for axis in twin.layout.split_axes)
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            rest[key] = _json(value)
        elif value.shape == twin.tensor.shape or not split:
            tensors[key] = value
        else:
            raise IntegrationError(
                f"the optimizer keeps {key!r} of shape {list(value.shape)} for {twin.name!r}, of which this rank holds "
                f"{list(twin.tensor.shape)}; only state with an element for each one of the parameter can be saved"
            )
    return _State(tensors, rest)


def _completed(twins: Twins, held: dict[str, _State], ranks: Ranks) -> dict[str, _State]:
    """The state, with zeros for parameters whose gradients only other ranks ever had: those that hold no element of
    one, and those that no token came to.

    Of each tensor that a checkpoint holds, every rank saves its part.
    """
    mine = {name for name, state in held.items() if state}
    lists = [set(json.loads(text)) for text in ranks.gather(json.dumps(sorted(mine)))]
    apart = set.union(*lists) - set.intersection(*lists)
    if not apart:
        return held
    facts = {
        name: [{key: dtype_name(value.dtype) for key, value in held[name].tensors.items()}, held[name].rest]
        for name in sorted(apart & mine)
    }
    known: dict[str, Any] = {}
    for text in ranks.gather(json.dumps(facts)):
        known.update(json.loads(text))
    filled = dict(held)
    for twin in twins.owned:
        if twin.name in apart - mine:
            kinds, rest = known[twin.name]
            zeros = {
                key: torch.zeros(twin.tensor.shape, dtype=getattr(torch, dtype))
                for key, dtype in kinds.items()
            }
            filled[twin.name] = _State(zeros, rest)
    return filled


def _json(value: Any) -> Any:
    """A setting or count as JSON has it; a tensor of one element with its dtype."""
    if isinstance(value, Tensor):
        return {"value": value.item(), "dtype": dtype_name(value.dtype)}
    return value


def _value(saved: Any) -> Any:
    """The value that `_json` was given; lists come back as tuples, which is what torch's optimizers have (`betas`)."""
    if isinstance(saved, dict):
        return torch.tensor(saved["value"], dtype=getattr(torch, saved["dtype"]))
    return tuple(saved) if isinstance(saved, list) else saved


def _settings(
    members: list[Twin], saved: dict[str, dict[str, Any]], checkpoint: Checkpoint
) -> dict[str, Any]:
    """The settings of a group, all of whose members had the same ones."""
    found = [saved[twin.name] for twin in members if twin.name in saved]
    if len(found) < len(members):
        new = next(twin.name for twin in members if twin.name not in saved)
        raise CheckpointError(
            f"{checkpoint.path}: its optimizer did not update {new!r}, and this run's does; resume with the same "
            "trained parameters"
        )
    if any(settings != found[0] for settings in found):
        raise CheckpointError(
            f"{checkpoint.path}: parameters of one group of this run's optimizer, that of {members[0].name!r}, had "
            "several settings; resume with the same groups"
        )
    return {key: _value(value) for key, value in found[0].items()} if found else {}
