"""Names of decoder layers: the index that a name has, and names with the index of the layer that a copy stands for."""

from __future__ import annotations

import re

from hyper_parallel.graph.alike_layers import Period


class LayerNames:
    """Names of modules, parameters and states of the layers of one list."""

    def __init__(self, layers: str) -> None:
        """`layers`: the name of the list."""
        self._name = re.compile(rf"(?:^|\.){re.escape(layers)}\.(\d+)(?:\.|$)")

    def index(self, name: str) -> int | None:
        """The index of the layer that a name is of; None outside of the list."""
        found = self._name.search(name)
        return int(found[1]) if found else None

    def renamed(self, name: str, kept: Period, copy: int) -> str:
        """A name with the model's index of its layer, in a copy of the period that stands for others."""

        def real(match: re.Match[str]) -> str:
            whole, start = match[0], match.start()
            at, end = match.start(1) - start, match.end(1) - start
            return f"{whole[:at]}{kept.real(int(match[1]), copy)}{whole[end:]}"

        return self._name.sub(real, name, count=1)
