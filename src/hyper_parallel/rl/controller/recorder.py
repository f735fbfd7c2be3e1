"""Recorder: the metrics of a batch, trackers, samples, and lines for the person who follows a run."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.rl.controller.scorer import Accuracy
from hyper_parallel.rl.queue import Counters
from hyper_parallel.rl.sample import Sample, groups_without_variance

SAMPLES = "samples.jsonl"
"""A line for each answer of the first group of each batch."""
_LINES = 20
"""About how many lines a run prints."""
_QUIET_S = 15.0
"""The longest time without one."""


class Recorder:
    """Of one run. Trackers are opened by `open`."""

    def __init__(self, config: RLConfig, told: Callable[[str], None]) -> None:
        self._config, self._told = config, told
        self._trackers: Any = None
        self._samples: Any = None
        self._last, self._last_step = time.monotonic(), 0
        self._begun, self._busy = time.monotonic(), dict[str, float]()
        self._warned = False

    def open(self, step: int) -> None:
        """From this step on; what was recorded of later ones is void."""
        # Imports torch for TensorBoard: after the workers were started.
        from hyper_parallel.train.trackers import RecordFile, RunInfo, build_trackers

        self.close()
        out = Path(self._config.out)
        info = RunInfo(out=out, config=self._config.model_dump(mode="json"), start=step)
        self._trackers = build_trackers(self._config.trackers, info)
        self._samples = RecordFile(out / SAMPLES, step)
        self._begun = self._last = time.monotonic()
        self._last_step = step

    def note(self, line: str) -> None:
        """One line."""
        self._told(line)

    def warm_up(self, step: int, loss: float, right: float | None) -> None:
        """After some supervised steps."""
        told = "" if right is None else f"   right {right:.3f} (sampled, held out)"
        self._told(f"warm-up {step:4d}   loss {loss:.3f}{told}")

    def batch(self, report: BatchReport, busy: Mapping[str, float]) -> None:
        """A trained batch. `busy`: seconds for which each group has worked until now."""
        now = time.monotonic()
        record = report.record()
        elapsed = max(now - self._begun, 1e-9)
        for name, seconds in busy.items():
            record[f"busy_{name}"] = (seconds - self._busy.get(name, 0.0)) / elapsed
        record["step_s"] = elapsed
        self._begun, self._busy = now, dict(busy)
        self._trackers.log(report.step, record)
        self.samples(report.step, report.samples)
        gap = record.get("behaviour_gap", 0.0)
        if gap > WIDE_GAP and not self._warned:
            self._warned = True
            self._told(
                f"step {report.step}: the log-probabilities of rollout and trainer differ by {gap:.2f} nats per token, "
                f"and above {WIDE_GAP} runs were seen to fall apart; lower rl.optimizer.lr or rl.staleness"
            )
        steps = self._config.rl.steps
        due = report.step % max(1, steps // _LINES) == 0 or report.step in (1, steps)
        if due or now - self._last > _QUIET_S:
            done = report.step - self._last_step
            seconds = (now - self._last) / max(done, 1)
            self._last, self._last_step = now, report.step
            self._told(
                f"step {report.step:4d}/{steps}   reward {shown(report.reward)}   "
                f"length {record['response_length']:.1f}   "
                f"staleness {record['staleness_mean']:.1f}   equal groups {record['groups_without_variance']:.0f}   "
                f"{seconds:.2f} s/step"
            )

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """The answers of a batch's first group, with their rewards or why there is none."""
        self._samples.write(
            *(
                {
                    "step": step,
                    "prompt": one.task.get("prompt", one.task.get("messages")),
                    **({"turns": list(one.turns)} if one.turns else {}),
                    "answer": one.text,
                    "reward": one.reward,
                    **({"failed": one.failed} if one.failed is not None else {}),
                    "versions": [min(one.versions), max(one.versions)],
                    "tokens": len(one.tokens),
                }
                for one in samples[: self._config.rl.group]
            )
        )

    def evaluation(self, step: int, found: Accuracy) -> None:
        """Of held-out prompts."""
        if self._trackers is not None:
            known = {key: value for key, value in asdict(found).items() if value is not None}
            self._trackers.log(step, {f"eval_{key}": float(value) for key, value in known.items()})
        self._told(
            f"step {step:4d}   held out: reward {shown(found.sampled)} sampled, {shown(found.greedy)} greedy "
            f"({found.prompts} prompts)"
        )

    def close(self) -> None:
        """Write what is held back."""
        for file in (self._trackers, self._samples):
            if file is not None:  # where `open` failed, there may be one without the other
                file.close()
        self._trackers = self._samples = None


def shown(reward: float | None) -> str:
    """A mean reward in a line; `none` where none could be computed."""
    return "none" if reward is None else f"{reward:.3f}"


WIDE_GAP = 0.1
"""Nats per token between the log-probabilities of rollout and trainer above which runs were seen to fall apart."""


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """One trained batch."""

    step: int
    samples: Sequence[Sample]
    metrics: Mapping[str, float]
    """The actor's."""
    staleness: Sequence[int]
    """Of each sample, in optimizer updates."""
    train_s: float
    group: int
    counters: Counters
    """Of the run until now."""
    failed_rewards: int
    """Of the run until now."""

    @property
    def reward(self) -> float | None:
        """The mean of those that are known; None where none is."""
        known = [one.reward for one in self.samples if one.reward is not None]
        return statistics.fmean(known) if known else None

    def record(self) -> dict[str, float]:
        """Numbers by name."""
        rewards = [one.reward for one in self.samples]
        groups = [rewards[at : at + self.group] for at in range(0, len(rewards), self.group)]
        lengths = [len(one.tokens) for one in self.samples]
        histogram = Counter(self.staleness)
        return {
            **({"reward": self.reward} if self.reward is not None else {}),
            "groups_without_variance": float(groups_without_variance(groups)),
            "response_length": statistics.fmean(lengths),
            "response_length_max": float(max(lengths)),
            "cut_answers": sum(not one.ended for one in self.samples) / len(self.samples),
            "staleness_mean": statistics.fmean(self.staleness),
            "staleness_max": float(max(self.staleness)),
            **{f"staleness_{key}": float(count) for key, count in sorted(histogram.items())},
            "wasted_share": self.counters.wasted_share,
            "failed_rewards": float(self.failed_rewards),
            "train_s": self.train_s,
            **self.metrics,
        }
