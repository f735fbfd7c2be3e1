"""Generation within a budget beside what others do, in short: every policy gives the tokens that ours gives."""

from __future__ import annotations

import generate_offload
import pytest
from generate_offload_cache import policies
from generation import Work, generated
from shapes import new_model


def test_policies_of_weights_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert not generate_offload.main(short=True, rows=("weights on flash",))
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].endswith("0 answers differ, the logits by 0.0e+00 at most")
    assert all(f"\n  {name}: " in shown for name in ("Accelerate disk_offload", "zig-zag"))


@pytest.mark.parametrize("policy", ["OffloadedCache's policy", "OffloadedStaticCache's policy", "LRU pages"])
def test_policies_of_caches_give_what_generate_gives(policy: str) -> None:
    model = new_model({**generate_offload.SHORT, "num_hidden_layers": 2})
    work = Work([[5, 6, 7], [8] * 70], [3, 4])
    # Room for two pages of the LRU policy: pages of both layers take turns.
    budget = (work.longest + 2 * 64) * 2 * 4 * 2 * 2 * 16
    made = policies(model.config, 2, work.longest, budget, 1 << 22)[policy]
    assert generated(model, work, 2, made) == generated(model, work, 2)
