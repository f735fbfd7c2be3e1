"""The last lines of a run."""

from __future__ import annotations

import shlex

from hyper_parallel.rl.controller.recorder import shown
from hyper_parallel.rl.run import RLSummary
from hyper_parallel.units import format_seconds


def lines(summary: RLSummary) -> list[str]:
    """What came of a run, and what to do next."""
    found = []
    if summary.before is not None and summary.after is not None:
        for name in ("sampled", "greedy"):
            before, after = getattr(summary.before, name), getattr(summary.after, name)
            found.append(f"held-out reward, {name + ':':8} {shown(before)} → {shown(after)}")
    found.append(
        f"{summary.steps} steps, {summary.tokens:,} tokens trained, in {format_seconds(summary.seconds)}"
        + (f"; groups of workers started again: {summary.restarts}" if summary.restarts else "")
    )
    if summary.failed_rewards:
        found.append(
            f"{summary.failed_rewards} rewards could not be computed (failed_rewards in metrics.jsonl)"
        )
    if summary.stopped:
        found.append("stopped; run the same command again: it goes on from the checkpoint")
    elif summary.checkpoint is not None:
        found.append(f'next: hyper-parallel generate {shlex.quote(summary.out)} --prompt "..."')
    return found
