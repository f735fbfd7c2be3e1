"""What the C library's allocator has given out to tensors, in processes with `allocations.c` in LD_PRELOAD.

`Allocations` reads its count after each operator, when whatever the operator's kernel took for itself is given back;
`most` is the allocator's own high-water mark, with the memory of kernels.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def compiled(folder: Path) -> Path:
    """The library, compiled into a folder. Raises where there is no C compiler, or no glibc."""
    made, source = folder / "allocations.so", Path(__file__).with_suffix(".c")
    flags = ["-O2", "-shared", "-fPIC", "-pthread", "-ldl"]
    subprocess.run(["cc", *flags, "-o", str(made), str(source)], check=True, capture_output=True)
    return made


class Allocations(TorchDispatchMode):
    """Inside, the most bytes beside what was allocated before, and what of that was `there` for the step."""

    def __init__(self, there: Sequence[Tensor]) -> None:
        super().__init__()
        self._library: Any = ctypes.CDLL(None)
        for name in ("allocations_live", "allocations_least", "allocations_most"):
            getattr(self._library, name).restype = ctypes.c_longlong
        counted = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in there}
        least = self._library.allocations_least()
        known = sum(count for count in counted.values() if count >= least)
        self._base = self._library.allocations_live() - known
        self._library.allocations_begin()
        self.peak = 0
        """Right after operators."""
        self.where = ""
        self._look("the beginning")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look(func)
        return result

    def _look(self, where: Any) -> None:
        found = self._library.allocations_live() - self._base
        if found > self.peak:
            self.peak, self.where = found, str(where)

    @property
    def most(self) -> int:
        """At any moment, within kernels too."""
        return int(self._library.allocations_most()) - self._base
