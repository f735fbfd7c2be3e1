"""The owner check: a small copy of the model computes what the owner of its code says, before training.

The region check proves a strategy against one device; this one proves one device against the model's own forward pass.
Comparisons, each of a small copy with random weights on random tokens, in float32 with float64 to decide:

- **loss**: our loss, its gradients and the buffers afterwards equal those of ``model(input_ids, labels=…)``;
- **rows**: two rows computed together equal each of them alone;
- **packing**: documents packed into one row equal each of them alone, wherever they bear loss;
- **length**: a row beside one of larger positions equals the row alone;
- **padding**: a document in its own row, filled up to the length of rows, equals the document alone.

`compare` makes them; `check` caches what they found, and agrees on it with the other ranks.
"""

from hyper_parallel.shard.owner_check.comparisons import Comparison, Kind, OwnerReport, compare

__all__ = ["Comparison", "Kind", "OwnerReport", "compare"]
