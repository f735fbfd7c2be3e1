"""HyperShard: a declared strategy makes an unmodified module run spread over a mesh.

`parallelize` returns the same module with the same parameter names; `sharded` gives its handle.
"""

from hyper_parallel.shard.load_weights import fill_weights, init_weights, load_weights
from hyper_parallel.shard.parallelize import parallelize
from hyper_parallel.shard.sharded_model import ShardedModel, ShardedParameter, sharded

__all__ = [
    "ShardedModel",
    "ShardedParameter",
    "fill_weights",
    "init_weights",
    "load_weights",
    "parallelize",
    "sharded",
]
