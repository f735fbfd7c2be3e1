"""Compilation of subgraphs by Inductor, with artifacts cached on disk."""

from hyper_parallel.graph.compiled.compile import LIMIT_SECONDS, Compiled, compiled
from hyper_parallel.graph.compiled.replace import is_compiled

__all__ = ["LIMIT_SECONDS", "Compiled", "compiled", "is_compiled"]
