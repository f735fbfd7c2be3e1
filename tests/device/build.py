"""The rehearsal device, compiled once and kept."""

from __future__ import annotations

import functools
import hashlib
import shutil
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

NATIVE = Path(__file__).parent / "native"
OLDEST = (2, 13)
"""The PyTorch whose interfaces of devices it has; older ones were not tried."""


def missing() -> str | None:
    """Why the device cannot be built here; None where it can."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        return f"the rehearsal device needs PyTorch {OLDEST[0]}.{OLDEST[1]}"
    for tool in ("g++", "ninja"):
        if shutil.which(tool) is None:
            return f"the rehearsal device needs {tool}"
    return None


@functools.cache
def native() -> ModuleType:
    """The compiled module; it takes PyTorch's PrivateUse1 in this process."""
    sources = sorted(NATIVE.glob("*.cpp"))
    text = b"".join(one.read_bytes() for one in [*sources, *NATIVE.glob("*.h")])
    digest = hashlib.sha256(text + torch.__version__.encode()).hexdigest()[:12]
    return cpp_extension.load(
        f"rehearsal_{digest}",
        [str(one) for one in sources],
        extra_cflags=["-O1", "-std=c++20", "-fno-var-tracking"],
    )
