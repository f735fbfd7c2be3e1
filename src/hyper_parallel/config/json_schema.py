"""The JSON schema (draft 2020-12) of a run file, a file of `rl`, of `generate`, or a Strategy, as editors use it."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel

from hyper_parallel.config.run import RunConfig
from hyper_parallel.config.schema import sections_of
from hyper_parallel.strategy.axes import AUTO

_TITLES = {
    "GenerateConfig": "HyperParallel generation file",
    "RLConfig": "HyperParallel reinforcement learning file",
    "RunConfig": "HyperParallel run file",
    "Strategy": "HyperParallel Strategy file",
}


def json_schema(model: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """The schema of a file: sections under every accepted name, `auto` where the planner can choose, and `extends`.

    A file with `extends` inherits keys, so keys are required only without it. Derived fields are left out.
    """
    body = model.model_json_schema()
    sections: dict[str, Any] = body.get("$defs", {})
    for section in (body, *sections.values()):
        properties = section.get("properties", {})
        for key in [key for key, field in properties.items() if field.get("readOnly")]:
            del properties[key]
    for section in sections_of(model):
        _add_other_names(section, sections.get(section.__name__, body).get("properties", {}))
    for section in (body, *sections.values()):
        for key in ("strategy", "axes"):
            field = section.get("properties", {}).get(key)
            if field is not None and "$ref" in field and model.__name__ in ("RunConfig", "Strategy"):
                field["anyOf"] = [{"$ref": field.pop("$ref")}, {"const": AUTO}]
    if "$ref" in body["properties"].get("roles", {}):
        roles = body["properties"]["roles"]
        roles["anyOf"] = [{"$ref": roles.pop("$ref")}, {"const": AUTO}]
    properties = {
        "extends": {
            "type": "string",
            "title": "Extends",
            "description": "A base file, relative to this one, that this file extends.",
        },
        **body["properties"],
    }
    if "version" not in body.get("required", []):  # a Strategy within a run file may leave it out, a file not
        body["required"] = ["version", *body.get("required", [])]
    whole: dict[str, Any] = {"required": body.pop("required"), "properties": {}}
    for key, field in properties.items():
        name = field.get("$ref", "").rpartition("/")[2]
        if name and "required" in sections[name]:
            whole["properties"][key] = {"required": sections[name].pop("required")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _TITLES[model.__name__],
        "description": body["description"],
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "if": {"not": {"required": ["extends"]}},
        "then": whole,
        "$defs": sections,
    }


def _add_other_names(section: type[BaseModel], properties: dict[str, Any]) -> None:
    """Adds a field's aliases, such as `tensor` for `tensor_x`, which pydantic's schema leaves out."""
    for name, field in section.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            for other in field.validation_alias.choices:
                if isinstance(other, str) and other not in properties:
                    properties[other] = {**properties[name], "title": other.title()}
