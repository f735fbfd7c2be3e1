"""An environment as users write them, which counts its turns and hangs, raises or dies when it is asked to."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

from hyper_parallel.rl.environments import Turn

_made = itertools.count(os.getpid())


class Counting:
    """Appends the number of the turn and what it has read; the answer says what else it does."""

    def reset(self, task: Mapping[str, Any]) -> str:
        """The row's prompt."""
        if task["prompt"] == "hang":
            time.sleep(600)
        self.read = [task["prompt"]]
        self.name = next(_made)
        return str(task["prompt"])

    def step(self, answer: str) -> Turn:
        """One turn."""
        self.read.append(answer)
        match answer:
            case "hang":
                time.sleep(600)
            case "raise":
                raise ValueError("no")
            case "die":
                os._exit(1)
            case "random":
                return Turn(text=str(self.name))
            case "number":
                return Turn(text=3)  # type: ignore[arg-type]
            case "end":
                return Turn(reward=float(len(self.read)), done=True)
        return Turn(text=f"{len(self.read)} {' '.join(self.read)}", reward=0.5)
