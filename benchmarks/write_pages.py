"""Write the tables of docs/ anew from the results that are kept: python benchmarks/write_pages.py

A benchmark writes its own tables when it ends. This is for when only their form has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import attack_models
import budget
import generate_kv_int8
import memory
import offload_choices_pages
import offload_pages
import plan_practice
import plan_search
import tiers
from measure import RESULTS
from pages import DOCS, put


@dataclass(frozen=True)
class Written:
    """A part of a page."""

    page: str
    script: str
    result: str
    """Under benchmarks/results; it may not be there yet."""
    lines: Callable[[Mapping[str, Any]], Iterable[str]]


PARTS = (
    Written("families.md", "attack_models.py", "attack_models.json", attack_models.page),
    Written("plan-practice.md", "plan_practice.py", "plan_practice.json", plan_practice.lines),
    Written("plan-search.md", "plan_search.py", "plan_search.json", plan_search.lines),
    Written("tiers.md", "tiers.py", "tiers.json", tiers.page),
    Written("inference-int8.md", "generate_kv_int8.py", "generate_kv_int8.json", generate_kv_int8.page),
    Written("memory.md", "memory.py", "memory.json", memory.page),
    Written("offload.md", "budget.py", "budget.json", budget.page),
    Written("offload.md", "offload.py", "offload.json", offload_pages.lines),
    Written("recomputation.md", "offload_choices.py", "offload_choices.json", offload_choices_pages.again),
    Written("host-update.md", "offload_choices.py", "offload_choices.json", offload_choices_pages.updates),
)


def main() -> None:
    """Each part whose result is there."""
    for part in PARTS:
        result = RESULTS / part.result
        if result.exists():
            put(DOCS / part.page, part.script, part.lines(json.loads(result.read_text())))
            print(f"docs/{part.page} from {part.result}")


if __name__ == "__main__":
    main()
