"""Every causal language model of the installed Transformers beside its owner, on one device.

    python benchmarks/owner.py [--families a b] [--slice 1/4] [--resume] [--page]

A family is the default config of its class with sizes cut (`harness.small_models`), with noise on each weight.
What HyperParallel computes from it, reads and writes is compared with what Transformers itself computes, writes and
reads (`owner_comparisons.py`): a verdict is right, adapted (right after a choice that is told), refused with a reason,
wrong, or a traceback. Each family is a forked process with a limit of time and of memory. `--page` writes the page
from the result that is kept. Exits with 1 when something is wrong or ends in a traceback.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Annotated, Any

import owner_comparisons
import transformers
from campaigns import Rows
from commandline import run
from measure import quiet
from pages import Benchmark, table
from processes import limit_memory

from harness import preloaded  # noqa: F401  (its imports, which forks then have)
from harness.small_models import causal_families

LIMIT_S = 120
"""A family that takes longer hangs."""
MEMORY = 4 << 30
"""Bytes that a family may take."""

COMPARISONS = {
    "loss": "loss, gradients and buffers of a step are those of `model(ids, labels=ids)`, auxiliary losses included",
    "rows": "two rows together give what each gives alone",
    "longer rows": "the same with rotary factors that follow the longest row (`rope_type: dynamic`)",
    "packing": "a run with `pack: true` has the mean loss of each document alone",
    "folder": "`hp.load_weights` gives the logits of the folder that `save_pretrained` wrote",
    "export": "a run is exported under the names that `save_pretrained` writes, and `from_pretrained` reads it",
}
"""Comparison to what it compares."""

_MARKS = {
    "right": "✓",
    "adapted": "a",
    "refused": "–",
    "no reference": "·",
    "wrong": "**wrong**",
    "traceback": "**crash**",
}
_BAD = ("wrong", "traceback")
_CLASS = re.compile(r"\b[A-Z]\w+(?:ForCausalLM|LMHeadModel|LMHead|ForConditionalGeneration)\b")
_NUMBER = re.compile(r"(?<![\w-])\d[\d.]*(?:e[+-]?\d+)?\b")


def compared(family: str) -> dict[str, Any]:
    """The verdicts of a family by comparison, from a fork of this process."""
    began = time.monotonic()
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_compare, args=(family, sending))
    child.start()
    sending.close()
    verdicts: dict[str, Any] = {}
    reason = ""
    try:
        while True:
            if not receiving.poll(max(0.0, began + LIMIT_S - time.monotonic())):
                reason = f"took more than {LIMIT_S} s"
                break
            name, verdicts[name] = receiving.recv()
    except EOFError:
        child.join()
        reason = f"the process ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()
    for name in COMPARISONS:
        verdicts.setdefault(name, {"verdict": "traceback", "detail": reason})
    return verdicts


def _compare(family: str, results: Connection) -> None:
    """The side of the fork, which is silent."""
    quiet(threads=1)
    limit_memory(MEMORY)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for named in owner_comparisons.comparisons(family):
        results.send(named)


def counted(rows: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """How many families come to what, by comparison."""
    counts = {}
    for name in COMPARISONS:
        verdicts = collections.Counter(row[name]["verdict"] for row in rows.values() if name in row)
        counts[name] = {verdict: verdicts[verdict] for verdict in _MARKS if verdicts[verdict]}
    return counts


def summary(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "transformers": transformers.__version__,
        "of": len(causal_families()),
        "processor_s": round(sum(map(_seconds, rows.values()))),
        "counts": counted(rows),
    }


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """A table of families and comparisons, and each reason once."""
    rows, counts = result["families"], result["counts"]
    yield (
        f"{len(rows)} of the {result['of']} families of Transformers {result['transformers']}. ✓ right, a adapted, "
        "– refused, · the owner itself has no such value."
    )
    yield ""
    kinds = [kind for kind in _MARKS if any(kind in count for count in counts.values())]
    yield from table(
        "Comparison|What is compared|" + "|".join(kinds),
        [[name, what, *(counts[name].get(kind, 0) for kind in kinds)] for name, what in COMPARISONS.items()],
        "ll" + "r" * len(kinds),
    )
    yield ""
    yield from table(
        "|" + "|".join(COMPARISONS),
        [
            [family, *(_MARKS[row[name]["verdict"]] if name in row else "" for name in COMPARISONS)]
            for family, row in sorted(rows.items())
        ],
    )
    for kind, title in (
        ("wrong", "Wrong"),
        ("traceback", "Crashes"),
        ("adapted", "Adapted"),
        ("refused", "Refused"),
    ):
        reasons = _reasons(rows, kind)
        if reasons:
            yield from ("", f"{title}:", "")
            yield from (
                f"- {name}: {', '.join(families)}: {reason}" for (name, reason), families in reasons.items()
            )


def _reasons(rows: Mapping[str, Any], kind: str) -> dict[tuple[str, str], list[str]]:
    """(comparison, reason) to the families. Reasons that differ in a class's name or in numbers are one."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in COMPARISONS:
        for family, row in sorted(rows.items()):
            if row.get(name, {}).get("verdict") == kind:
                reason = row[name].get("detail", "")
                if kind not in _BAD:
                    reason = _NUMBER.sub("N", _CLASS.sub("the model", reason))
                reasons.setdefault((name, reason), []).append(family)
    return reasons


BENCHMARK = Benchmark("owner", {"families.md": lines}, key="families")


def slice_of(families: Sequence[str], part: str) -> list[str]:
    """Every n-th family, for a part i/n. Neighbours, which are alike, are in different parts."""
    number, count = map(int, part.split("/"))
    return list(families[number - 1 :: count])


def main(
    families: Annotated[tuple[str, ...], "only these"] = (),
    slice: Annotated[str, "i/n: every n-th family"] = "1/1",
    resume: Annotated[bool, "only families without a result"] = False,
    page: Annotated[bool, "write the page from the result that is kept"] = False,
) -> bool:
    """Compare the families; whether something is wrong or crashes."""
    if page:
        BENCHMARK.write_pages()
        return False
    rows = Rows(BENCHMARK, again=not (resume or families), summary=summary)
    wanted = list(families) or slice_of(causal_families(), slice)
    bad = False
    for family in rows.missing(wanted, again=not resume):
        row = rows.rows[family] = compared(family)
        rows.rows = dict(sorted(rows.rows.items()))
        rows.write()
        bad |= _told(family, row)
    for name, count in counted(rows.rows).items():
        print(f"{name}: {', '.join(f'{number} {verdict}' for verdict, number in count.items())}")
    return bad


def _seconds(row: Mapping[str, Any]) -> float:
    """The processor's seconds of a family."""
    return sum(float(row[name].get("seconds", 0)) for name in COMPARISONS if name in row)


def _told(family: str, row: Mapping[str, Any]) -> bool:
    """Print a family's verdicts; whether one is bad."""
    verdicts = {name: row[name] for name in COMPARISONS}
    shown = ", ".join(f"{name} {one['verdict']}" for name, one in verdicts.items())
    print(f"{family} ({_seconds(row):.1f} s): {shown}", flush=True)
    bad = {name: one for name, one in verdicts.items() if one["verdict"] in _BAD}
    for name, one in bad.items():
        print(f"    {name}: {one.get('detail')} ({one.get('error')})", flush=True)
    return bool(bad)


if __name__ == "__main__":
    run(main)
