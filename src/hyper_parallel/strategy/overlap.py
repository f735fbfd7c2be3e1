"""`overlap` section: scheduling of collectives in parallel with computation."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hyper_parallel.strategy.section import Section


class Overlap(Section):
    """Overlap of communication with computation, in a step that runs from its graph."""

    schedule: Literal["auto", "usual", "none"] = "auto"
    """`auto` simulates schedules of the step on `cluster` and takes the fastest if it beats the order of the model's
    code. `usual` is FSDP2's schedule, without simulation: weights are gathered one layer ahead, and gradients are
    reduced during the next layer. `none` keeps the order of the model's code.
    """
    cluster: str | None = None
    """The machine that `auto` simulates: a preset such as `h100`, or a cluster file such as `hyper-parallel calibrate`
    writes. Default: the device's preset; without one, `auto` is `usual`."""
    pieces: bool = False
    """Let `auto` split collectives of rows into chunks, each overlapped with the matrix product of another chunk.
    Results are then equal up to rounding, since a kernel may sum in another order for another number of rows; without
    chunks they are equal bit for bit.
    """

    @model_validator(mode="after")
    def _simulates(self) -> Overlap:
        if self.cluster is not None and self.schedule != "auto":
            raise ValueError(
                f"'cluster' is what 'schedule: auto' simulates, and schedule is {self.schedule}; "
                "set schedule to auto, or leave cluster out"
            )
        if self.pieces and self.schedule != "auto":
            raise ValueError(
                f"'pieces' is for 'schedule: auto', which finds out whether they pay, and schedule is {self.schedule}; "
                "set schedule to auto, or leave pieces out"
            )
        return self
