"""One simulated step for all tests of the reports."""

from __future__ import annotations

import pytest

from harness.llama_step import Shape, llama_step
from hyper_parallel.cluster import Cluster
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Timeline


@pytest.fixture(scope="session")
def timeline() -> Timeline:
    """Four layers of a Llama on 64 H100."""
    return simulate(llama_step(Shape(layers=4)), Cluster.named("h100x64"))
