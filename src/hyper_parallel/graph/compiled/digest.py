"""The name of a subgraph's artifact: a digest of all that the code made for it depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from hyper_parallel.graph.alike_layers import likeness
from hyper_parallel.graph.compiled.partition import Subgraph


def digest(subgraph: Subgraph, environment: Mapping[str, str]) -> str:
    """32 hexadecimal digits. Subgraphs of the same operators on tensors of the same kind have the same one, wherever in
    a step they are and whatever its nodes are called."""
    content = repr((likeness(subgraph.graph().nodes), sorted(environment.items())))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
