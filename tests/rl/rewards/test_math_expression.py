"""The math verifier: labelled pairs, which part of a text is the answer, and hostile answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards import answer_match
from hyper_parallel.rl.rewards.answer_match import equal, extracted, math_expression
from hyper_parallel.rl.rewards.pool import RewardPool

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text().splitlines()]


def test_labelled_pairs() -> None:
    judged = [equal(pair["answer"], [pair["reference"]]) for pair in PAIRS]
    pairs = list(zip(PAIRS, judged, strict=True))
    assert [pair for pair, found in pairs if found and not pair["equal"]] == []
    assert [pair for pair, found in pairs if not found and pair["equal"]] == []


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("5", "The answer is $x=5$, as shown."),
        ("12", "#### 12 apples"),
        ("x+1", "Answer: 1+x"),
        ("Evelyn", "The answer is Evelyn."),
        (r"\text{No Solution}", r"\boxed{no  solution}"),
        ("0.5", "It is 0.5, I think"),
        (r"\frac{7}{6}", r"\boxed{1.1\overline{6}}"),
        ("$5$", "5"),
        ("3", r"\boxed{3.}"),
        ("2i", r"\boxed{\sqrt{-4}}"),
        ("C", "The answer is (C)."),
        ("1000", r"\boxed{1~000}"),
        ("#### 7", r"\boxed{7}"),
        (r"2\sqrt{3}", r"\boxed{2\sqrt{3}\text{ cm}}"),
        ("5", "**Answer:** 5"),
        (r"t \geq 6", r"\boxed{6 \leqslant t}"),
        (r"$-2 < s$", "#### s > -2"),
        ("5", "The answer is:\n\n\\[\n5\n\\]\nas was to be shown, in 3 steps"),
    ],
)
def test_equal(reference: str, answer: str) -> None:
    assert equal(answer, [reference])


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("listen", "silent"),
        (r"\text{Tuesday}", r"\boxed{yadseuT}"),
        ("1/3", "0.333"),
        ("5", "x=5 or x=-5"),
        ("5", r"\boxed{5, 6}"),
        ("1.5", r"\boxed{1{,}5}"),
        ("12", "1 2"),
        ("x=2", "y=2"),
        (r"t \geq 6", r"\boxed{6 \ge t}"),
        ("3", r"2\sqrt{3} cm"),
        ("3", "**Answer:** 2\nfor 3"),
        ("", ""),
        ("0", r"\boxed{}"),
        ("1", r"\boxed{1} or rather \boxed{2}"),
    ],
)
def test_different(reference: str, answer: str) -> None:
    assert not equal(answer, [reference])


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{7", r"\boxed{7"),
        (r"First \boxed{ and then \boxed{8}.", "8"),
        (r"\boxed{8}, and now \boxed{9", "8"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right"),
        ("We add.\n#### 42\n", "42"),
        ("So the answer is: 12.", "12"),
        ("Answer: 3 apples", "3 apples"),
        ("17", "17"),
    ],
)
def test_the_answer_in_a_text(answer: str, found: str) -> None:
    assert extracted(answer) == found


def test_the_reward() -> None:
    assert math_expression("", r"It is \boxed{0.5}", {"answer": r"\frac12"}) == 1.0
    assert math_expression("", "3", {"answer": ["2", "3"]}) == 1.0
    bad: list[dict[str, Any]] = [{}, {"answer": 3}, {"answer": []}]
    for task in bad:
        with pytest.raises(DataError, match="under the key 'answer'"):
            math_expression("", "3", task)


MARK = "math-verifier-was-here"
HOSTILE = [
    r"\boxed{10^{10^{10^{10}}}}",
    "9**9**9**9",
    "9^9^9^9",
    "The answer is 9^9^9^9^9",
    r"\boxed{\binom{10^6}{5 \cdot 10^5}}",
    r"\boxed{\binom{10000000}{5000000}}",
    r"\boxed{1000000!}",
    r"\boxed{((((10!)!)!)!)!}",
    r"\boxed{" + "+".join(["x"] * 1900) + "}",
    r"\boxed{" + "+".join(["1"] * 20_000) + "}",
    "+".join(f"{n}x^{n}" for n in range(1, 400)),
    r"\boxed{" + "(" * 1500 + "1" + ")" * 1500 + "}",
    r"\boxed{" + "((1)+" * 600 + "1" + ")" * 600 + "}",
    r"\boxed{" + r"\frac{1}{" * 400 + "1" + "}" * 400 + "}",
    r"\boxed{" + r"\sqrt{" * 500 + "2" + "}" * 500 + "}",
    r"\boxed{" + "{" * 3000,
    r"\boxed{" * 3000,
    r"\boxed{(a+b+c+d+f+g+h)^{200}}",
    r"\boxed{((((x+y+1)^8+z)^8+w)^8+v)^8}",
    r"\boxed{\int_0^{1} e^{x^{x^{x}}} \sin(x^{x}) dx}",
    r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^{n}}}",
    r"\boxed{\prod_{n=1}^{10^{9}} (n^2+1)}",
    r"\boxed{\lim_{x \to 0} \frac{\sin(\tan(x^{9}))}{x^{x^{x}}}}",
    r"\boxed{\begin{pmatrix}"
    + r"\\".join("&".join(["x^9"] * 20) for _ in range(20))
    + r"\end{pmatrix}^{99}}",
    r"\boxed{0.\overline{" + "7" * 3500 + "}}",
    "1" * 3900,
    "$" * 3999,
    f"__import__('os').system('touch {MARK}')",
    f"\\boxed{{\\text{{__import__('os').system('touch {MARK}')}}}}",
    f"The answer is 1+(lambda: open('{MARK}', 'w'))().",
    f"\\boxed{{\\operatorname{{eval}}(open('{MARK}','w'))}}",
    f"\\boxed{{x.__class__.__mro__[-1].__subclasses__()}} open('{MARK}','w')",
]


def test_hostile_answers_cost_their_samples_only(tmp_path: Path) -> None:
    assert len(HOSTILE) >= 30
    with RewardPool("math", workers=2, time_limit_s=60.0, folder=tmp_path) as pool:
        pids = pool.pids
        for number, answer in enumerate(HOSTILE):
            pool.submit((number, "hostile"), "", answer, {"answer": "5"})
            pool.submit((number, "right"), "", r"It is \boxed{\frac{10}{2}}", {"answer": "5"})
        found = {}
        while pool.waiting:
            found |= dict(pool.results(1.0))
        assert (pool.pids, pool.counters["restarts"], pool.counters["done"]) == (pids, 0, 2 * len(HOSTILE))
    values = {key: (reward.value, reward.failed) for key, reward in found.items()}
    for number in range(len(HOSTILE)):
        assert values[number, "hostile"] == (0.0, None), HOSTILE[number][:80]
        assert values[number, "right"] == (1.0, None), HOSTILE[number][:80]
    assert not Path(MARK).exists()


def test_a_long_answer_is_not_looked_into() -> None:
    start = time.process_time()
    for answer in (
        r"\boxed{" * 100_000,
        "answer is " * 100_000,
        "{" * 1_000_000,
        r"\boxed{" + "1+" * 1_000_000 + "1}",
    ):
        assert not equal(answer, ["5"])
    assert time.process_time() - start < 5


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789xyab+-*/^(){}[]\\., fracsqrtpi=\n", max_size=60))
def test_any_text_is_prepared_without_an_error(text: str) -> None:
    answer_match._spelled(extracted(text))
    assert equal(text, [text]) == bool(extracted(text))


def test_the_library_is_imported_when_it_is_needed() -> None:
    program = (
        "import sys, hyper_parallel.rl.rewards.reward as reward\nreward.load_reward('math')\n"
        "assert not {'sympy', 'math_verify'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
