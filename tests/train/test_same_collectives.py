"""Whether ranks have captured steps with the same order of collectives, by one reduction of digests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.told_ranks import among
from hyper_parallel.step import engine

SHAPE: Any = "a shape"


def graphs(*others: list[float]) -> Any:
    """Graphs of a rank whose other ranks told these numbers."""

    class Graphs(dict[Any, Any]):
        orders_collectives = True
        uncompiled = None
        shadow = SimpleNamespace(handle=among(*others))

        def ready(self, shape: Any) -> bool:
            return shape in self

    return Graphs({SHAPE: SimpleNamespace(plain=None)})


def told(digest: list[float], refused: float = 0.0, uncompiled: float = 0.0) -> list[float]:
    return [refused, uncompiled, *digest, *(-byte for byte in digest)]


@pytest.mark.parametrize("apart", [False, True])
def test_orders_are_compared_over_all_ranks(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [float(at + 1) for at in range(engine.DIGEST)]
    monkeypatch.setattr(engine, "order_digest", lambda _: own)
    other = [*own[:-1], own[-1] + apart]
    assert engine._tried(graphs(told(own), told(other)), SHAPE, "cpu") == (False, False, apart)


def test_one_rank_that_has_no_graph_or_cannot_compile_is_known_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = [1.0] * engine.DIGEST
    monkeypatch.setattr(engine, "order_digest", lambda _: own)
    assert engine._tried(graphs(told(own, refused=1.0)), SHAPE, "cpu") == (True, False, False)
    assert engine._tried(graphs(told(own, uncompiled=1.0)), SHAPE, "cpu") == (False, True, False)
