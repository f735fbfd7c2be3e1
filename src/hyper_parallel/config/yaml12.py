"""YAML read strictly: duplicate keys refused, scalars by YAML 1.2's core schema, errors with file and line.

PyYAML resolves scalars by YAML 1.1, in which `1e-3` is a string, `no` a boolean and `2026-01-01` a date. Here
they are by the core schema of YAML 1.2.2, section 10.3: `1e-3` is a float, and the other two are text. Underscores
between digits (`1_000_000`) are read as digits, as in YAML 1.1.

A document of a few lines can expand to more than fits in memory: aliases of aliases, merges of merges, a number of
thousands of digits, a list that contains itself. So the expanded size of each node is counted while the document is
composed, before anything is built from it.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from hyper_parallel.errors import ConfigError

_INT = re.compile(r"^[-+]?[0-9][0-9_]*$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_MERGE = re.compile(r"^<<$")

_RESOLVERS = (
    ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", _MERGE, "<"),
)

MOST_VALUES = 20_000
"""Maximum number of keys and values of a document, with aliases expanded."""
MOST_LEVELS = 50
"""Maximum nesting depth of sections and lists."""
_MOST_DIGITS = 400
_FORMS = {
    f"tag:yaml.org,2002:{name}": form
    for name, form in (
        ("str", None),
        ("seq", None),
        ("map", None),
        ("bool", _BOOL),
        ("int", _INT),
        ("float", _FLOAT),
        ("null", _NULL),
        ("merge", _MERGE),
    )
}
"""The tags of plain data, with the pattern of a scalar of each."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the core schema's scalars, no duplicate keys, and bounds on the expanded
    size.
    """

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 - a fresh table, not the parent's

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._nodes: dict[int, tuple[int, int]] = {}  # id to (values that it stands for, levels)
        self._composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self._composed += 1
        if self._composed > MOST_VALUES:
            raise _problem(f"more than {MOST_VALUES} keys and values", event)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._nodes:
                raise _problem("an alias refers to a node that contains it", event)
            return node
        below = [self._nodes[id(child)] for child in _children(node)]
        count = 1 + sum(values for values, _ in below)
        levels = 1 + max((depth for _, depth in below), default=0)
        if count > MOST_VALUES:
            raise _problem(f"more than {MOST_VALUES} keys and values, with aliases written out", event)
        if levels > MOST_LEVELS:
            raise _problem(f"nested too deeply, more than {MOST_LEVELS} levels", event)
        self._nodes[id(node)] = count, levels
        self._check_form(node, event)
        return node

    def _check_form(self, node: Any, event: Any) -> None:
        if node.tag not in _FORMS:
            raise _problem("a tag that is not plain data", event)
        form, text = _FORMS[node.tag], node.value
        if not isinstance(node, yaml.ScalarNode):
            return
        if form is not None and (len(text) > _MOST_DIGITS or not form.match(text)):
            kind = node.tag.rpartition(":")[2]
            raise _problem(f"a value of {len(text)} characters that is no {kind} which can be read", event)

    def compose_mapping_node(self, anchor: Any) -> Any:
        # While composing: later, merge keys have added their entries to the node and look like duplicates.
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                problem = (
                    f"the key {key.value!r} stands twice, on lines {seen[key.value]} and {line}; remove one"
                )
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen[key.value] = line
        return node


def _children(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _problem(text: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, text, event.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else; never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        """Unicode line breaks would be folded into spaces: only double quotes escape them."""
        style = '"' if set(data) & set("\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


def _construct_int(loader: yaml.SafeLoader, node: Any) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    found = int(text, 8) if text.startswith("0o") else int(text, 16) if text.startswith("0x") else int(text)
    if not -(2**63) <= found < 2**63:
        raise _problem("a whole number beyond 64 bits", node)
    return found


def _construct_float(loader: yaml.SafeLoader, node: Any) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    found = float(text.replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(found) and "inf" not in text:
        raise _problem("a number beyond what 64 bits can hold", node)
    return found


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))
_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse(text: str, source: str, *, lines: bool = True) -> Any:
    """The data of a YAML document; `source` names it in errors, with the line if it has several.

    Raises ConfigError for a syntax error, a duplicate key, or a tag that is not plain data, with its place.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark is not None and lines else source
        context = f" ({error.context})" if error.context and error.problem else ""
        mend = _mend(error, text)
        raise ConfigError(
            f"{where}: not valid YAML: {error.problem or error.context}{context}{mend}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None


_MENDS = (
    ("'\\t' that cannot start", "; a tab stands there: indent with spaces"),
    ("could not find expected ':'", "; line {start} has no colon: write 'key: value'"),
    (
        "mapping values are not allowed",
        "; keys of one section begin in the same column, and text with a colon needs quotes",
    ),
    ("expected <block end>", "; keys of one section begin in the same column"),
    ("but got ':'", "; a comma is missing between two keys of {{...}}"),
    ("but got '<stream end>'", "; a bracket that opens on line {start} is not closed"),
    ("unexpected end of stream", "; a quote that opens on line {start} is not closed"),
    ("expected '<document start>'", "; JSON lines are data: name the file as data.train in a run file"),
)
"""Parts of PyYAML's problems, with what mends them. `start`: the line where the construct begins."""


def _mend(error: yaml.MarkedYAMLError, text: str) -> str:
    problem = str(error.problem)
    if "<document start>" in problem and not text.lstrip().startswith("{"):
        return ""
    mark = error.context_mark or error.problem_mark
    start = mark.line + 1 if mark is not None else 1
    return next((mend.format(start=start) for part, mend in _MENDS if part in problem), "")


def write(data: Any) -> str:
    """A YAML document that `parse` reads back as equal data, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
