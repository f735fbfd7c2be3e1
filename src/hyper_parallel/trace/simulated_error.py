"""Error interval of a simulated step: covers 90% of the published runs that were simulated.

    seconds in [s · exp(−r₉₅), s · exp(−r₅)]                                                   `simulated_between`

r₅ and r₉₅ are quantiles of log(simulated / measured), for dense models and for mixtures of experts.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

SIMULATED = Path(__file__).with_name("simulated_residuals.json")
"""r₅ and r₉₅ by kind of model: written by `benchmarks/simulate_published.py`."""


@cache
def _residuals() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(SIMULATED.read_text())
    return found


def simulated_between(seconds: float, mixture: bool) -> tuple[float, float]:
    """Seconds between which nine of ten measured steps lie whose simulated step takes `seconds`."""
    found = _residuals()["mixture" if mixture else "dense"]
    return seconds * math.exp(-found["high"]), seconds * math.exp(-found["low"])
