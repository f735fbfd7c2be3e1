"""Ways in which people write training loops, under a budget: the bits of the plain loop, or a refusal."""

from __future__ import annotations

import pytest

from harness.loop_patterns import PATTERNS, run

SAMPLE = (
    *("checkpoint, dropout, autocast", "resumed optimizer", "adapters, checkpoint, autocast"),
    *("hooks of every kind", "layers left out by Python"),
)
REFUSED = {
    *("a generator seeded each time", "seeds in the forward pass", "layers left out by Python"),
    *("two calls, one backward pass", "gradients of gradients"),
}


@pytest.mark.parametrize(
    "name",
    [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.matrix) for name in PATTERNS],
)
def test_a_pattern_is_equal_or_refused(name: str) -> None:
    found = run(name)
    assert found["came"] == ("refused" if name in REFUSED else "equal"), found
    assert found.get("tight", "equal") == "equal", found
