"""Summary of a run, as values and as text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.train.budget_usage import BudgetUse
from hyper_parallel.units import format_count, format_seconds

_NO_PREDICTION = (
    "none: no cluster was named. `hyper-parallel calibrate`, then add train.profile.cluster=cluster.yaml"
)


@dataclass(frozen=True)
class Summary:
    """The outcome of `Trainer.run`; also in `<out>/summary.json`. Losses are in nats for a valid token."""

    out: str
    steps: int
    """Updates done, those before a resume included."""
    stopped: bool
    """The run was asked to stop before its last step."""
    resumed_from: int | None
    """The step that this run went on from, None when it began at 0."""
    vocabulary: int
    parameters: int
    initial_loss: float | None
    """Of the first step, before any update; ln(vocabulary) is what a model that knows nothing has."""
    final_loss: float | None
    """Of the last step's batch, before its update."""
    eval_before: float | None
    """On held-out text, before the first update."""
    eval_after: float | None
    tokens: int
    """Positions computed over all steps, padding included."""
    seconds: float
    """Spent in training steps of this run, without evaluation and saving."""
    tokens_per_second: float | None
    """Of this run's steps."""
    mfu: float | None
    """Model FLOPs utilisation of this run's steps, None where the device's peak is not known."""
    checkpoint: str | None
    sample: str | None
    conversations: bool = False
    """The text has conversations, so that the model answers messages."""
    skipped: int = 0
    """Steps whose loss or gradient norm was not finite and that were left out (`train.on_nonfinite`)."""
    budget: BudgetUse | None = None
    """What the memory budget came to, on this rank; None without one."""
    profile: list[str] | None = None
    """The page and the traces of measured steps, with the prediction where there is one; None where no steps were
    measured."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-able values; what is not finite is None."""
        finite = lambda v: None if isinstance(v, float) and not math.isfinite(v) else v  # noqa: E731
        return {key: finite(value) for key, value in asdict(self).items()}

    @classmethod
    def read(cls, out: str | Path) -> Summary:
        """The summary of a finished run from its folder."""
        found = json.loads((Path(out) / "summary.json").read_text(encoding="utf-8"))
        if found.get("budget") is not None:
            found["budget"] = BudgetUse(**found["budget"])
        return cls(**found)

    def write(self) -> None:
        """Write `<out>/summary.json`."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        publish(Path(self.out) / "summary.json", text.encode())

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line that is shown."""
        rows = [("steps", f"{self.steps}{' (stopped early)' if self.stopped else ''}")]
        if self.skipped:
            rows.append(("skipped", f"{self.skipped} (loss or gradient norm not finite)"))
        if self.resumed_from is not None:
            rows.append(("resumed from", f"step {self.resumed_from}"))
        rows.append(("parameters", format_count(self.parameters)))
        if self.initial_loss is not None:
            known = math.log(self.vocabulary)
            rows.append(
                (
                    "initial loss",
                    f"{self.initial_loss:.4f}, {self.initial_loss / known:.4f} of ln {self.vocabulary} = {known:.4f}",
                )
            )
        if self.final_loss is not None:
            rows.append(("final train loss", f"{self.final_loss:.4f}"))
        if self.eval_before is not None:
            after = f" → {self.eval_after:.4f}" if self.eval_after is not None else ""
            rows.append(("held-out loss", f"{self.eval_before:.4f}{after}"))
        rows.append(("tokens", format_count(self.tokens)))
        if self.tokens_per_second is not None:
            mfu = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
            rows.append(
                (
                    "time",
                    f"{format_seconds(self.seconds)}, {format_count(self.tokens_per_second)} tokens/s{mfu}",
                )
            )
        if self.budget is not None:
            rows += self.budget.rows()
        if self.profile is not None:
            page, *traces = self.profile
            rows.append(("profile", page))
            rows += [("trace", f"{trace} (opens in ui.perfetto.dev)") for trace in traces]
            if len(traces) == 1:
                rows.append(("prediction", _NO_PREDICTION))
        rows.append(("metrics", f"{self.out}/metrics.jsonl"))
        if self.checkpoint is not None:
            rows.append(("checkpoint", self.checkpoint))
        return rows
