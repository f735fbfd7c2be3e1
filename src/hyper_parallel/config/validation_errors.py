"""Validation errors in terms of the file's keys, one line for each problem."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from hyper_parallel.config.foreign_words import foreign_hint, foreign_value
from hyper_parallel.config.merge import Kinds, present, value_at
from hyper_parallel.config.schema import field_at, sections_at
from hyper_parallel.errors import nearest
from hyper_parallel.untrusted import printable

MOST_LINES = 20
"""Maximum number of reported problems; of the others only the number is reported."""

Where = tuple[str | int, ...]
_MAIN = ("name", "compute", "path", "train", "method")
"""Keys that a section is about."""
_THOUSANDS = re.compile(r"([0-9]{1,9})[kK]")

_EXPECTED: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be keys with values",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "mapping_type": "must be keys with values",
    "model_attributes_type": "must be a section with keys",
    "model_type": "must be a section with keys",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "union_tag_invalid": "must be one of {expected_tags}",
}


def explain(
    error: ValidationError, model: type[BaseModel], data: Any, kinds: Kinds, source: Callable[[Where], str]
) -> list[str]:
    """One line for each problem; `source` names the file or the override that brought a value.

    ``run.yaml: train.optimizer.lr: must be greater than 0 (got -1)``
    """
    groups: dict[Any, list[tuple[Where, str, str]]] = {}
    for number, detail in enumerate(error.errors()):
        where, choice = _where(detail, data, kinds)
        told = _told(detail, model, where)
        groups.setdefault(number if choice is None else choice, []).append((where, *told))
    lines: list[str] = []
    more = 0
    for problems in groups.values():
        if len(lines) >= MOST_LINES:
            more += 1
            continue
        # A value that may be of several types is refused once by each: the type that got furthest is meant.
        depth = max(len(where) for where, _, _ in problems)
        meant = [problem for problem in problems if len(problem[0]) == depth]
        for place, got in {where: got for where, _, got in meant}.items():
            texts = dict.fromkeys(text for where, text, _ in meant if where == place)
            text = " or ".join(texts).replace(" or must be ", " or ")
            dotted = ".".join(map(str, place))
            dotted = printable(dotted if len(dotted) <= 200 else dotted[:197] + "...")
            lines.append(f"{source(place)}: {dotted + ': ' if dotted else ''}{text}{got}")
    if more:
        lines.append(f"{source(())}: and {more} more problems")
    return lines


def _where(detail: Any, data: Any, kinds: Kinds) -> tuple[Where, Where | None]:
    """The location in the file, without the type names that pydantic inserts, and the location of a union.

    A union is a value that may have several types, if the problem lies with one of these types.
    """
    loc: Where = tuple(detail["loc"])
    where: list[str | int] = []
    choice: Where | None = None
    named: set[Where] = set()
    for at, part in enumerate(loc):
        here = tuple(where)
        if here in kinds and here not in named:
            named.add(here)
            key, default = kinds[here]  # type: ignore[index]
            section = value_at(data, here)
            if isinstance(section, Mapping) and section.get(key, default) == part:
                continue
        absent = at == len(loc) - 1 and detail["type"] in ("missing", "unknown_key")
        if absent or present(data, (*here, part)) == len(here) + 1:
            where.append(part)
        elif part != "[key]":
            choice = here
    if detail["type"] == "union_tag_invalid":
        where.append(detail["ctx"]["discriminator"].strip("'"))
    return tuple(where), choice


def _told(detail: Any, model: type[BaseModel], where: Where) -> tuple[str, str]:
    """The requirement, and the actual value as `` (got …)`` or nothing."""
    kind, context, given = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "unknown_key":
        return _unknown(detail["msg"], model, where), ""
    if kind == "missing":
        field = field_at(model, where)
        meaning = f": {field.description.splitlines()[0]}" if field and field.description else ""
        return f"is missing; give it a value{meaning}", ""
    if kind in ("value_error", "assertion_error"):
        return detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "), ""
    if kind in ("literal_error", "enum", "union_tag_invalid"):
        choices = context.get("expected_tags") or context.get("expected", "")
        tag = context.get("tag", given)
        known = [choice.strip("' ") for choice in choices.replace(" or ", ", ").split(", ")]
        meant = foreign_value(tag, known)
        hint = nearest(str(tag), known) if meant is None else f"; write {meant}"
        one_of = "one of " if len(known) > 1 else ""
        return f"must be {one_of}{choices}", f" (got {_show(tag)}{hint})"
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"must have at {'least' if kind == 'too_short' else 'most'} {bound} elements", ""
    expected = _EXPECTED.get(kind)
    if expected is None:
        return detail["msg"], f" (got {_show(given)})"
    mend = "; put it in quotes" if kind == "string_type" and isinstance(given, bool | int | float) else ""
    if given is None and kind in ("model_type", "model_attributes_type"):
        mend = ", an empty section; give it keys or remove it"
    elif kind in ("model_type", "model_attributes_type") and (key := _main_key(model, where, given)):
        mend = f"; write {{{key}: {foreign_value(given, ['bfloat16', 'float32']) or given}}}"
    elif kind in ("model_type", "model_attributes_type") and isinstance(given, str) and given != "auto":
        mend = foreign_hint(model, (given,))
    elif kind in ("list_type", "tuple_type") and isinstance(given, str):
        mend = f"; write [{given}]"
    elif kind == "int_parsing" and (found := _THOUSANDS.fullmatch(str(given))):
        mend = f"; write {int(found[1]) * 1000} or {int(found[1]) * 1024}, in digits"
    elif given == "auto":
        mend = "; the planner chooses axes: set strategy, strategy.axes or single degrees to auto"
    return expected.format(**{k: _show(v) for k, v in context.items()}), f" (got {_show(given)}{mend})"


def _unknown(told: str, model: type[BaseModel], where: Where) -> str:
    """The message about an unknown key: the key that another framework's word means, else the nearest one here."""
    key, colon, value = str(where[-1]).partition(":")
    if colon and value and "://" not in str(where[-1]) and field_at(model, (*where[:-1], key)) is not None:
        return f"unknown key; a space belongs after the colon: '{key}: {value}'"
    hint = foreign_hint(model, where)
    return f"unknown key{hint}" if hint else told


def _main_key(model: type[BaseModel], where: Where, given: Any) -> str | None:
    """The key of a section that a single value is meant for: ``name`` for ``optimizer: adamw``."""
    field = field_at(model, where)
    if field is None or not isinstance(given, str) or given == "auto":
        return None
    known = {name for section in sections_at(field) for name in section.model_fields}
    return next((key for key in _MAIN if key in known), None)


def _show(value: Any) -> str:
    """A value as YAML, shortened."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.0f}"
    text = (
        json.dumps(value, ensure_ascii=False, default=str).replace('"', "'") if value is not None else "null"
    )
    return text if len(text) <= 60 else text[:57] + "..."
