"""Parts of a step compiled by Inductor: which parts, their artifacts on disk, and the graph that calls them."""

from hyper_parallel.graph.compiled.compile import LIMIT_SECONDS, Compiled, compiled

__all__ = ["LIMIT_SECONDS", "Compiled", "compiled"]
