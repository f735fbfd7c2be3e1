"""The base of every section of a file: frozen, keyword-only, strict about its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from hyper_parallel.errors import nearest


class Section(BaseModel):
    """A part of a file. Keys of which no engine exists yet stand in ``reserved`` and are refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    reserved: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for key in given:
            if key in cls.reserved:
                raise ValueError(f"{key!r} is not built yet: {cls.reserved[key]}; remove it from the file")
            if key not in known:
                hint = nearest(str(key), known) or f"; the keys here are {', '.join(sorted(known))}"
                raise ValueError(f"unknown key {key!r}{hint}")
        return given
