"""What the verifiers `math` and `code` reward: python benchmarks/verifiers.py

`math`: 124 labelled pairs of a reference and an answer, judged by a pool, and by math-verify with its own defaults (as
its README calls it; 5 s for each answer). `code`: three programs (of which one reads its input, one /dev/stdin, and one
defines a function), each in 20 shapes of answers, and the same with a mistake, which must have no reward. An answer is
right (rewarded or not, as its label says), wrong (rewarded, and its label says no) or refused (not rewarded, and its
label says yes).
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from commandline import run
from measure import ROOT
from pages import Benchmark, table

from hyper_parallel.rl.rewards.pool import RewardPool

PAIRS = ROOT / "tests/rl/rewards/math_pairs.jsonl"
FUNCTION = "def f(x):\n    return x + 1\n"
PROGRAMS = {
    "input()": ("n = int(input())\nprint(n + 1)\n", [{"input": "5\n", "output": "6"}]),
    "/dev/stdin": (
        "with open('/dev/stdin') as lines:\n    for line in lines:\n        print(int(line) + 1)\n",
        [{"input": "5\n6\n", "output": "6\n7"}],
    ),
    "function": (FUNCTION, ["assert f(1) == 2", {"expression": "f(-1)", "value": 0}]),
}


def _before(mark: str, text: str) -> str:
    return "".join(f"{mark}{line}\n" for line in text.splitlines())


SHAPES: dict[str, Callable[[str], str]] = {
    "no fence": lambda p: p,
    "python": lambda p: f"Here it is:\n```python\n{p}```\nIt adds one.",
    "py": lambda p: f"```py\n{p}```",
    "Python3": lambda p: f"```Python3\n{p}```",
    "no language": lambda p: f"```\n{p}```",
    "tildes": lambda p: f"~~~python\n{p}~~~",
    "four backticks": lambda p: f"````python\n{p}````",
    "with a title": lambda p: f'```python title="a.py"\n{p}```',
    "with a file": lambda p: f"```python:a.py\n{p}```",
    "{python}": lambda p: f"```{{python}}\n{p}```",
    "{.python .numberLines}": lambda p: f"```{{.python .numberLines}}\n{p}```",
    "in a list": lambda p: "1. Write\n\n" + _before("   ", f"```python\n{p}```") + "\n2. Run it.",
    "in a list's first line": lambda p: f"- ```python\n{_before('  ', p)}  ```",
    "quoted": lambda p: _before("> ", f"```python\n{p}```"),
    "not closed": lambda p: f"```python\n{p}",
    "output behind it": lambda p: f"```python\n{p}```\nOutput:\n```\n6\n```",
    "text behind it": lambda p: f"```python\n{p}```\n```text\n6\n```",
    "a command behind it": lambda p: f"```python\n{p}```\nRun it:\n```bash\npython a.py\n```",
    "a draft before it": lambda p: f"```python\nprint(0)\n```\nThat is wrong. Better:\n```python\n{p}```",
    "exit() at its end": lambda p: f"```python\n{p}exit()\n```",
}


def judged(name: str, answers: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[list[float | None], float]:
    """The rewards by a pool with one worker, and its processor time in seconds for each."""
    asked = list(answers)
    used = _children()
    with RewardPool(name, workers=1, time_limit_s=60.0) as pool:
        for number, (answer, task) in enumerate(asked):
            pool.submit(number, "", answer, task)
        found: dict[Any, float | None] = {}
        while pool.waiting:
            found |= {key: reward.value for key, reward in pool.results(1.0)}
    return [found[number] for number in range(len(asked))], (_children() - used) / len(asked)


def counts(labels: Iterable[bool], rewarded: Iterable[bool]) -> dict[str, int]:
    """Right, wrong and refused."""
    both = list(zip(labels, rewarded, strict=True))
    return {
        "right": sum(label == given for label, given in both),
        "wrong": both.count((False, True)),
        "refused": both.count((True, False)),
    }


def main() -> None:
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    labels = [pair["equal"] for pair in pairs]
    rewards, seconds = judged("math", [(pair["answer"], {"answer": pair["reference"]}) for pair in pairs])
    by_pool = [value == 1 for value in rewards]
    result: dict[str, Any] = {
        "table": {
            "`math`": counts(labels, by_pool),
            "math-verify 0.9 with its defaults": counts(labels, map(_by_defaults, pairs)),
        },
        "misjudged": [
            f"{pair['answer'][:60]} for {pair['reference']}"
            for pair, rewarded in zip(pairs, by_pool, strict=True)
            if rewarded != pair["equal"]
        ],
        "math, ms of processor time": round(seconds * 1e3, 1),
    }
    for right, name in ((True, "`code`, right programs"), (False, "`code`, programs with a mistake")):
        cases = [(shape, program) for shape in SHAPES for program in PROGRAMS]
        rewards, _ = judged("code", [_answer(shape, program, right) for shape, program in cases])
        result["table"][name] = counts([right] * len(cases), [value == 1 for value in rewards])
        result["misjudged"] += [
            f"{shape}, {program}"
            for (shape, program), value in zip(cases, rewards, strict=True)
            if (value == 1) != right
        ]
    print(json.dumps(result, indent=1))
    BENCHMARK.keep(result)


def _answer(shape: str, program: str, right: bool) -> tuple[str, dict[str, Any]]:
    text, tests = PROGRAMS[program]
    return SHAPES[shape](text if right else text.replace("+ 1", "+ 2")), {"tests": tests}


def _by_defaults(pair: Mapping[str, str]) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(f"${pair['reference']}$"), parse(pair["answer"])))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/rl-rewards.md."""
    yield from table(
        "Judged by | Answers | Right | Wrong | Refused",
        (
            (name, sum(found[key] for key in ("right", "wrong", "refused")), *found.values())
            for name, found in result["table"].items()
        ),
        "lrrrr",
    )


BENCHMARK = Benchmark("verifiers", {"rl-rewards.md": page})

if __name__ == "__main__":
    run(main)
