"""Mutation testing: small faults drawn at random from the source, and whether the suite notices each of them.

    python benchmarks/mutants.py draw --seed 42 --count 150 mutants.json
    python benchmarks/mutants.py instrument mutants.json CLONE RECORDS    # then run its suite, see below
    python benchmarks/mutants.py reach mutants.json RECORDS reach.json    # which tests came to each mutated line
    python benchmarks/mutants.py judge mutants.json reach.json verdicts.json CLONE ...
    python benchmarks/mutants.py keep mutants.json verdicts.json [MORE ...]   # with verdicts of further tests

A mutant replaces one expression: a comparison by its neighbour, an operator by another, a condition by its opposite, a
number by the next, True by False, a called statement by nothing. Expressions are those of functions' bodies; each
folder of the package has at least three. The clone is a copy of the working tree (`git clone`); `instrument` writes
probes into its source, with which the suite records the tests that evaluate an expression, in all processes that they
start:

    cd CLONE && PYTHONPATH=src python -m pytest -p hyper_parallel._probe -n 2
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from measure import write

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/hyper_parallel")
FAILED = re.compile("(FAILED|ERROR) ")

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
PROBE = '''"""Records that an expression was evaluated, and by which test. A plugin of pytest, too."""

import os

seen = set()
test_of_process = [None]
os.register_at_fork(after_in_child=lambda: test_of_process.__setitem__(0, None))


def pytest_configure(config):
    os.environ["HP_PYTEST_PID"] = str(os.getpid())


def pytest_runtest_logstart(nodeid, location):
    with open(f"{RECORDS}/current-{os.getpid()}", "w") as file:
        file.write(nodeid)


def current_test():
    for pid in (*ancestors(), os.environ.get("HP_PYTEST_PID")):
        try:
            with open(f"{RECORDS}/current-{pid}") as file:
                return file.read()
        except OSError:
            pass
    return "unknown"


def ancestors():
    pid = os.getpid()
    while pid > 1:
        yield pid
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return


def hit(number):
    if os.environ.get("HP_PYTEST_PID") == str(os.getpid()):
        test = os.environ.get("PYTEST_CURRENT_TEST", "collection").rpartition(" (")[0]
    else:
        # A process that a test started: the pytest process above it keeps the test's name in a file.
        test = test_of_process[0] = test_of_process[0] or current_test()
    if (number, test) not in seen:
        seen.add((number, test))
        with open(f"{RECORDS}/hits-{os.getpid()}", "a") as file:
            file.write(f"{number}\\t{test}\\n")
'''


@dataclass(frozen=True)
class Mutant:
    """An expression of a file and what stands in its place."""

    number: int
    file: str
    line: int
    start: int
    """Offset in the file's UTF-8 bytes."""
    end: int
    before: str
    after: str


def candidates(file: Path) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each expression of a file that has a fault to offer, with the faulty expression."""
    tree = ast.parse(file.read_text())
    skipped = set[int]()
    for node in ast.walk(tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            annotations.append(node)
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Subscript):
            # Of a message; of types that stand in brackets (`tuple[int, ...]`), constants only.
            annotations.append(node.slice if isinstance(node, ast.Subscript) else node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            annotations += node.decorator_list
        for part in annotations:
            if part is not None:
                skipped.update(map(id, ast.walk(part)))
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node): node for body in bodies for statement in body for node in ast.walk(statement)}
    for node in inside.values():
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
            yield node, ast.Compare(node.left, ops, node.comparators)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant | ast.JoinedStr):
                continue
            yield node, ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        elif isinstance(node, ast.BoolOp):
            yield node, ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node, node.operand
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, ast.Constant(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, ast.Constant(node.value + 1 if node.value < 100 else 2 * node.value)
        elif isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(
            node.test, ast.Name | ast.Attribute | ast.Call
        ):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node.value, ast.Constant(None)


def draw(seed: int, count: int, least: int) -> list[Mutant]:
    """`count` mutants, `least` in each folder and the rest by the number of candidates."""
    folders: dict[str, list[tuple[Path, ast.expr, ast.expr]]] = defaultdict(list)
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        place = file.relative_to(ROOT / PACKAGE).parts
        folder = place[0] if len(place) > 1 else "."
        folders[folder] += [(file, *candidate) for candidate in candidates(file)]
    folders = {name: found for name, found in folders.items() if found}
    dice = random.Random(seed)
    chosen = [
        entry for _, found in sorted(folders.items()) for entry in dice.sample(found, min(least, len(found)))
    ]
    taken = set(map(id, chosen))
    rest = [entry for _, found in sorted(folders.items()) for entry in found if id(entry) not in taken]
    chosen += dice.sample(rest, count - len(chosen))
    return [_mutant(number, *entry) for number, entry in enumerate(chosen)]


def _mutant(number: int, file: Path, before: ast.expr, after: ast.expr) -> Mutant:
    lines = file.read_bytes().splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    start = begins[before.lineno - 1] + before.col_offset
    end = begins[before.end_lineno - 1] + before.end_col_offset  # type: ignore[operator]
    text = file.read_bytes()[start:end].decode()
    return Mutant(
        number, str(file.relative_to(ROOT)), before.lineno, start, end, text, f"({ast.unparse(after)})"
    )


def placed(mutant: Mutant, clone: Path) -> Mutant:
    """The mutant where its expression stands in this clone, whose file may have changed around it.

    Raises ValueError where the expression is gone.
    """
    content, text = (clone / mutant.file).read_bytes(), mutant.before.encode()
    starts = [match.start() for match in re.finditer(re.escape(text), content)]
    if not starts:
        raise ValueError(f"{mutant.file} has {mutant.before!r} no longer; draw mutants of this source")
    start = min(starts, key=lambda start: abs(start - mutant.start))
    return replace(mutant, start=start, end=start + len(text))


def instrument(mutants: list[Mutant], clone: Path, records: Path) -> None:
    """Write probes into the clone's source: the mutated expressions then record the tests that evaluate them."""
    records = records.resolve()  # the processes that write there have other folders
    records.mkdir(parents=True, exist_ok=True)
    (clone / PACKAGE / "_probe.py").write_text(f"RECORDS = {str(records)!r}\n" + PROBE)
    files: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        files[mutant.file].append(placed(mutant, clone))
    call = '(__import__("hyper_parallel._probe", fromlist=["hit"]).hit({}) or '
    for name, found in files.items():
        content = (clone / name).read_bytes()
        edits = [(mutant.start, call.format(mutant.number)) for mutant in found]
        edits += [(mutant.end, ")") for mutant in found]
        # From the end on, so that offsets hold; where one expression ends and none begins at the same place.
        for offset, text in sorted(edits, reverse=True):
            content = content[:offset] + text.encode() + content[offset:]
        ast.parse(content)
        (clone / name).write_bytes(content)


def reach(mutants: list[Mutant], records: Path) -> dict[int, list[str]]:
    """The tests that evaluated each mutated expression."""
    tests: dict[int, set[str]] = {mutant.number: set() for mutant in mutants}
    for file in records.glob("hits-*"):
        for line in file.read_text().splitlines():
            number, _, test = line.partition("\t")
            tests[int(number)].add(test or "collection")
    return {number: sorted(found) for number, found in tests.items()}


def judge(mutant: Mutant, tests: list[str], clone: Path, timeout: float) -> dict[str, object]:
    """Run the tests in this order with the mutant in place, up to the first that fails: `caught`, and `by` which."""
    if not tests:
        return {"caught": False, "by": "", "seconds": 0.0}
    mutant, file = placed(mutant, clone), clone / mutant.file
    original = file.read_bytes()
    began = time.monotonic()
    try:
        _write(file, original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
        code, output = run_tests(tests, clone, timeout)
    finally:
        _write(file, original)
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in output.splitlines() if FAILED.match(line)]
    by = failed[0] if failed else "" if code == 0 else output.strip()[-300:]
    return {"caught": code != 0, "by": by, "seconds": round(time.monotonic() - began, 1)}


def _write(file: Path, content: bytes) -> None:
    """Replace a source file and forget its bytecode, which Python tells from the source by its second and size."""
    file.write_bytes(content)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def run_tests(tests: list[str], clone: Path, timeout: float) -> tuple[int, str]:
    """The exit code of pytest on these tests, which ends with the first failure, and what it prints."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "100",
        *tests,
    ]
    path = os.pathsep.join(str(clone / part) for part in ("src", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    shutil.rmtree(clone / ".cache", ignore_errors=True)  # what passed without the mutant
    with subprocess.Popen(
        command,
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 0, ""  # nothing failed in that time; a test that hangs fails by a limit of its own
    return process.returncode, output


def judge_all(
    mutants: list[Mutant],
    reached: dict[str, list[str]],
    costs: dict[str, float],
    clones: list[Path],
    timeout: float,
    out: Path,
) -> None:
    """Judge each mutant, in as many processes as there are clones; then run the tests that failed without a mutant."""
    verdicts: dict[str, dict[str, object]] = json.loads(out.read_text()) if out.exists() else {}
    waiting = [mutant for mutant in mutants if str(mutant.number) not in verdicts]
    waiting.sort(key=lambda mutant: sum(costs.get(test, 0.0) for test in reached[str(mutant.number)]))
    lock = threading.Lock()

    def work(clone: Path) -> None:
        while waiting:
            with lock:
                if not waiting:
                    return
                mutant = waiting.pop(0)
            tests = [test for test in reached[str(mutant.number)] if "::" in test]
            tests.sort(key=lambda test: costs.get(test, 0.0))
            verdict = judge(mutant, tests, clone, timeout)
            with lock:
                verdicts[str(mutant.number)] = {"tests": len(tests), **verdict}
                out.write_text(json.dumps(verdicts, indent=1))
                print(mutant.number, mutant.file, mutant.line, verdict, flush=True)

    workers = [threading.Thread(target=work, args=(clone,)) for clone in clones]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    guilty = sorted({str(verdict["by"]) for verdict in verdicts.values() if "::" in str(verdict["by"])})
    for test in guilty:
        code, _ = run_tests([test], clones[0], timeout)
        if code:  # it fails in any case: it has caught nothing
            for number in [number for number, verdict in verdicts.items() if verdict["by"] == test]:
                print(f"mutant {number}: {test} fails without it, too", flush=True)
                del verdicts[number]
    out.write_text(json.dumps(verdicts, indent=1))
    caught = sum(bool(verdict["caught"]) for verdict in verdicts.values())
    print(f"{caught} of {len(verdicts)} mutants caught")


def keep(mutants: list[Mutant], verdicts: list[Path]) -> None:
    """Write the result: how many each set of verdicts catches that those before let pass, and what all let pass."""
    left, caught = {str(mutant.number): mutant for mutant in mutants}, []
    for file in verdicts:
        found = json.loads(file.read_text())
        noticed = [number for number in left if found.get(number, {}).get("caught")]
        caught.append({"verdicts": file.stem, "judged": len(found), "caught": len(noticed)})
        for number in noticed:
            del left[number]
    survivors = [
        {"file": one.file, "line": one.line, "before": one.before, "after": one.after}
        for one in left.values()
    ]
    write("mutants", {"mutants": len(mutants), "caught": caught, "survivors": survivors})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("draw")
    one.add_argument("--seed", type=int, default=42)
    one.add_argument("--count", type=int, default=150)
    one.add_argument("--least", type=int, default=3, help="in each folder")
    one.add_argument("mutants", type=Path)
    one = commands.add_parser("instrument")
    for name in ("mutants", "clone", "records"):
        one.add_argument(name, type=Path)
    one = commands.add_parser("reach")
    for name in ("mutants", "records", "out"):
        one.add_argument(name, type=Path)
    one = commands.add_parser("judge")
    for name in ("mutants", "reached", "verdicts"):
        one.add_argument(name, type=Path)
    one.add_argument(
        "clones", type=Path, nargs="+", help="copies of the tree, without probes; one process in each"
    )
    one.add_argument("--timeout", type=float, default=2000, help="seconds for the tests of a mutant")
    one.add_argument("--costs", type=Path, help="test to seconds, as JSON: the cheapest tests run first")
    one = commands.add_parser("keep")
    one.add_argument("mutants", type=Path)
    one.add_argument("verdicts", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "draw":
        drawn = draw(arguments.seed, arguments.count, arguments.least)
        arguments.mutants.write_text(json.dumps([asdict(mutant) for mutant in drawn], indent=1))
        print(Counter(mutant.file.split("/")[2] for mutant in drawn))
        return
    mutants = [Mutant(**entry) for entry in json.loads(arguments.mutants.read_text())]
    if arguments.command == "instrument":
        instrument(mutants, arguments.clone, arguments.records)
    elif arguments.command == "reach":
        arguments.out.write_text(json.dumps(reach(mutants, arguments.records), indent=1))
    elif arguments.command == "keep":
        keep(mutants, arguments.verdicts)
    elif arguments.command == "judge":
        costs = json.loads(arguments.costs.read_text()) if arguments.costs else {}
        reached = json.loads(arguments.reached.read_text())
        clones = [clone.resolve() for clone in arguments.clones]
        judge_all(mutants, reached, costs, clones, arguments.timeout, arguments.verdicts)


if __name__ == "__main__":
    main()
