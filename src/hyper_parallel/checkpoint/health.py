"""Checkpoint health: whether the saved weights are finite and sensible enough to resume from.

Three records mark a checkpoint as ruined: the commit marker, if a tensor has elements that no step can compute with
(`unusable` in the ranks' indexes); the run's state, under ``health.ruined``; and ``verdict.json``, which the run adds
later, since only the step after a save shows whether the saved weights are healthy. The verdict is sealed like the
marker but separate from it. A ruined checkpoint can still be loaded by naming it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.checkpoint.digest_json import seal, unseal
from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.untrusted import open_within, printable, read_bytes

VERDICT = "verdict.json"
LARGEST_WEIGHT = torch.finfo(torch.float32).max ** 0.5
"""1.8e19: the square of a larger weight is infinite in every dtype that steps compute in, and so is their norm."""
LARGEST_FINITE = torch.finfo(torch.float64).max
_SHOWN = 3
_LARGEST = 2**20


def usable(values: torch.Tensor, largest: float) -> bool:
    """Whether all elements are finite and none is larger in magnitude than `largest`."""
    # A comparison with NaN is false.
    return values.numel() == 0 or bool(values.abs().amax().item() <= largest)


def unusable(tensors: Sequence[str]) -> str:
    """A message that these tensors have elements that are not `usable`."""
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return f"not finite, or beyond what a step can compute with: {', '.join(tensors[:_SHOWN])}{more}"


def unhealthy(path: Path, marker: Mapping[str, Any]) -> str | None:
    """Why a checkpoint is ruined, in words; None if nothing marks it as ruined."""
    names = marker.get("unusable")
    if isinstance(names, list) and names:
        return f"ruined: {unusable([printable(str(name)) for name in names])}"
    health = marker["state"].get("health")
    if isinstance(health, Mapping) and health.get("ruined"):
        return printable(f"ruined: {health['ruined']}")
    try:
        return printable(str(unseal(read_bytes(open_within(path, VERDICT), _LARGEST))["why"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{VERDICT}: cannot be read: {error.strerror}"
    except (ValueError, KeyError) as error:
        return f"{VERDICT}: {error}"


def pass_over(path: Path, why: str) -> None:
    """Mark a committed checkpoint as ruined, so that readers skip it. Raises OSError."""
    publish(path / VERDICT, seal({"why": why}))
