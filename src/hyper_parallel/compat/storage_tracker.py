"""Storage tracker: size, kind, origin and lifetime of every storage that a block of code allocates.

Bytes are kept by storages and not by tensors, of which several may share one. A storage is of *weights* if it was
computed from parameters and constants alone (casts, gathered shards), else of *activations*: gradients are too. The
clock counts operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.compat.dispatch import mutated_arguments
from hyper_parallel.trace import live_bytes


class Kind(IntEnum):
    """What a storage was computed from; what is computed from several kinds is of the highest."""

    CONSTANT = 0
    WEIGHT = 1
    ACTIVATION = 2


@dataclass(eq=False)
class Record:
    """One storage."""

    bytes: int
    kind: Kind
    made_by: str
    born: int
    died: int | None = None
    given: bool = False
    """It was there before."""


class Storages(TorchDispatchMode):
    """Inside this context every new storage is recorded. `label()` says who is making it."""

    def __init__(self, label: Callable[[], str]) -> None:
        super().__init__()
        self.clock = 0
        self.records: list[Record] = []
        self._label = label
        self._known: dict[int, tuple[Record, Any]] = {}

    def give(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """Tensors that are there before: not counted, but what is computed from them is of their kind."""
        for tensor in tensors:
            record = self._record(tensor, kind)
            record.kind, record.given = kind, True

    def kept(self, excluded: Collection[torch.Tensor] = ()) -> Iterator[Record]:
        """What is alive now, apart from weights, what was given, and the storages `excluded`."""
        without = {id(self._record(tensor, Kind.ACTIVATION)) for tensor in excluded}
        return (record for record in self._counted(without) if record.died is None)

    def peak(self, excluded: Collection[torch.Tensor]) -> int:
        """The most bytes that were alive at once, apart from weights, what was given, and the storages `excluded`."""
        without = {id(self._record(tensor, Kind.ACTIVATION)) for tensor in excluded}
        return live_bytes.peak(
            (record.born, self.clock + 1 if record.died is None else record.died, record.bytes)
            for record in self._counted(without)
        )[0]

    def _counted(self, without: Collection[int]) -> Iterator[Record]:
        """What is told apart neither by its kind nor by its id."""
        return (
            record
            for record in self.records
            if not record.given and record.kind != Kind.WEIGHT and id(record) not in without
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What was not seen being made was there before, and belongs to parameters: FSDP2 pads them, for one.
        inputs = [
            self._record(t, Kind.WEIGHT, given=True)
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        ]
        kind = max((record.kind for record in inputs), default=Kind.CONSTANT)
        result = func(*args, **kwargs)
        self.clock += 1
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        for tensor in outputs:
            self._record(tensor, kind)
        # These write to what they return, and do not all say so.
        written_to = outputs if func.namespace in ("c10d", "fsdp") else ()
        for changed in (*mutated_arguments(func, args, kwargs), *written_to):
            record = self._record(changed, kind)
            record.kind = max(record.kind, kind)
        return result

    def _record(self, tensor: torch.Tensor, kind: Kind, given: bool = False) -> Record:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found = self._known.get(id(storage))
        if found is not None:
            return found[0]
        record = Record(storage.nbytes(), kind, self._label(), self.clock, given=given)
        key = id(storage)

        def died(_: object) -> None:
            record.died = self.clock
            self._known.pop(key, None)

        self._known[key] = (record, weakref.ref(storage, died))
        self.records.append(record)
        return record
