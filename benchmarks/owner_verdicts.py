"""Verdicts of comparisons with the owner of a model, and what all of them are drawn from.

A verdict is a dict: ``verdict`` (right, adapted, refused, wrong, traceback or no reference), ``error`` (the largest
difference over the largest element of what is right), ``detail``, one line, and ``seconds`` of the processor.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from campaigns import one_line
from torch import Tensor

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.report import TOLERANCE

Verdict = dict[str, Any]
Tensors = Mapping[str, Tensor]

ROWS, LENGTH = 2, 32
FIRST_ID = 8
"""Ids below it may have a meaning of their own, as padding has."""
LAST_ID = FIRST_ID + 94
"""Each id is a printable character of ASCII; every family's small vocabulary has more."""

_FOLDER = re.compile(r"/tmp/\w+")
"""Of one run only."""


class NoReferenceError(Exception):
    """The owner itself does not compute this."""


def verdict(error: float, detail: str = "", limit: float = TOLERANCE["float32"]) -> Verdict:
    """Right where the error is within the limit."""
    result = {"verdict": "right"} if error <= limit else {"verdict": "wrong", "detail": detail}
    return {**result, "error": float(f"{error:.2g}")} if math.isfinite(error) else result


def judged(comparison: Callable[[], Verdict]) -> Verdict:
    """The verdict of a comparison, also where it raises, and the processor's seconds."""
    began = time.process_time()
    result = _judged(comparison)
    return {**result, "seconds": round(time.process_time() - began, 1)}


def _judged(comparison: Callable[[], Verdict]) -> Verdict:
    try:
        return comparison()
    except HyperParallelError as refusal:
        return {"verdict": "refused", "detail": one_line(_FOLDER.sub("…", str(refusal)), 600)}
    except NoReferenceError as reason:
        return {"verdict": "no reference", "detail": one_line(reason)}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "hyper_parallel" in frame.filename]
        place = (ours or frames)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return {"verdict": "traceback", "detail": f"{where}: {type(error).__name__}: {one_line(error)}"}


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """Inside, the owner computes."""
    try:
        yield
    except Exception as error:
        raise NoReferenceError(f"{type(error).__name__}: {one_line(error)}") from error


def difference(right: Tensors, got: Tensors) -> tuple[float, str]:
    """The largest error of a tensor over its largest element, which counts as 1e-4 of the norm of all at least; and
    the tensor's name. A tensor that one side lacks is zero there."""
    norm = float(sum(float(tensor.double().square().sum()) for tensor in right.values())) ** 0.5
    worst, where = 0.0, ""
    for name in {**right, **got}:
        a, b = right.get(name), got.get(name)
        present = a if a is not None else b
        assert present is not None
        a = torch.zeros_like(present) if a is None else a
        b = torch.zeros_like(present) if b is None else b
        if a.shape != b.shape:
            return float("inf"), f"{name} has the shape {[*b.shape]}, not {[*a.shape]}"
        if not a.numel():
            continue
        scale = max(float(a.double().abs().max()), 1e-4 * norm, 1e-30)
        error = float((a.double() - b.double()).abs().max()) / scale
        if not error <= worst:
            worst, where = error if error == error else float("inf"), name
    return worst, where


def without_cache(model: Any) -> Any:
    """A Transformers model whose forward keeps no keys and values, which some keep wrongly where they train."""
    model.config.use_cache = False
    return model


def draw_ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """int64 [rows, length] random ids."""
    return torch.randint(FIRST_ID, LAST_ID, (rows, length), generator=torch.Generator().manual_seed(0))
