"""Checkpoints: atomically committed, verified byte by byte, loadable into any layout.

`Writer` saves in the background, `newest` finds the newest verified checkpoint, `read` fills tensors from it under any
other layout and number of ranks, `export` writes a Hugging Face folder, `export_adapter` PEFT's. docs/checkpoints.md
describes the format.
"""

from hyper_parallel.checkpoint.adapters import export_adapter
from hyper_parallel.checkpoint.export import export
from hyper_parallel.checkpoint.rank_agreement import Ranks
from hyper_parallel.checkpoint.reader import read
from hyper_parallel.checkpoint.shard import Piece
from hyper_parallel.checkpoint.verify import Found, newest, of_step
from hyper_parallel.checkpoint.writer import Writer

__all__ = ["Found", "Piece", "Ranks", "Writer", "export", "export_adapter", "newest", "of_step", "read"]
