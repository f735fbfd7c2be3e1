"""Refuse the names of devices and of their collective libraries outside `compat/`.

    python tools/check_device_words.py [FOLDER]

A device is a back end that `compat/` registers; code elsewhere that names one would have to be written again for
the next. Comments and docstrings are prose and may name them. What else may is in EXCEPTIONS, each with its reason.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "hyper_parallel"
WORDS = re.compile(r"(?<![A-Za-z])(cuda|npu|nccl|hccl)|(Cuda|Npu|Nccl|Hccl)|(?<![A-Z])(CUDA|NPU|NCCL|HCCL)")

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("config/launch.py", '"cuda"'): "the file says which kind of device is meant, and an editor completes it",
    ("config/launch.py", '"npu"'): "the file says which kind of device is meant, and an editor completes it",
}
"""(file, token) to the reason why it may stand there."""


def findings(root: Path) -> Iterator[str]:
    """One line for each word that stands where it may not, and for each exception that is no longer used."""
    used: set[tuple[str, str]] = set()
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if file.startswith("compat/"):
            continue
        for line, token, word in words(path.read_text(encoding="utf-8")):
            if (file, token) in EXCEPTIONS:
                used.add((file, token))
            else:
                yield f"{path}:{line}: {word!r} in {token[:60]!r} belongs into compat/"
    for file, token in sorted(EXCEPTIONS.keys() - used):
        if (root / file).exists():
            yield f"{root / file}: the exception for {token} is not used; remove it from {Path(__file__).name}"


def words(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, token, word) for each token of code that holds a word; comments and docstrings are passed over."""
    prose = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or token.start in prose:
            continue
        for match in WORDS.finditer(token.string):
            yield token.start[0], token.string, match[0]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE
    found = list(findings(root))
    for line in found:
        print(line)
    print(f"device words: {len(found)} outside compat/")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
