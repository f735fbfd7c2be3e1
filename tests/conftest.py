"""Shared by the whole suite: one thread a process, because two cores serve every worker of every test, and no time
limit on an example of a property, because nothing here asserts a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Checks that passed are kept between runs, but not among those of the person who runs the tests.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".cache" / "tests")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The hub of these tests is a server on loopback.
os.environ.pop("HF_HUB_OFFLINE", None)

pytest_plugins = ["harness.meter"]

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def half_attention() -> None:
    """Skip where PyTorch's attention does not compute in bfloat16: under an ATEN_CPU_CAPABILITY without AVX-512 it
    asks the processor, which has it, and then the kernels, which have not."""
    import torch

    query = torch.zeros(1, 1, 64, 16, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    except RuntimeError as error:
        pytest.skip(f"PyTorch's attention in bfloat16: {error}")


@pytest.fixture(autouse=True)
def logs_stay_on() -> Iterator[None]:
    """A test that turns log messages off for good is itself at fault, not the later one that misses a message."""
    yield
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    assert disabled == logging.NOTSET
