"""The gloo harness of the test suite: a function run on several real ranks, forked with torch already loaded.

from harness import run_ranks

def _total(rank: int, world: int, offset: int) -> int:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return int(total)

def test_total() -> None:
    assert run_ranks(_total, 4, 1) == [10] * 4
"""

from harness.ranks import RanksError, run_ranks

__all__ = ["RanksError", "run_ranks"]
