"""TensorBoard event files in `<out>/tensorboard`."""

from __future__ import annotations

import os

from hyper_parallel.train.trackers.tracker import Record, RunInfo


class TensorBoard:
    """Scalars under their metrics' names. A resume tells TensorBoard to forget the steps that it does again."""

    def __init__(self, run: RunInfo) -> None:
        # TensorBoard would look for TensorFlow, which takes seconds where it is installed and is not used.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.out / "tensorboard"
        purge = run.start + 1 if run.start or self.folder.exists() else None
        self._writer = SummaryWriter(str(self.folder), purge_step=purge)

    def log(self, step: int, record: Record) -> None:
        """A scalar for each value, under `train/` or, for an evaluation's, `eval/`."""
        for name, value in record.items():
            tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
            self._writer.add_scalar(tag, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """The text, as a code block."""
        self._writer.add_text(name, f"```\n{text}\n```", step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
