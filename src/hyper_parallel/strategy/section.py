"""The base of every section of a file: frozen, keyword-only, strict about its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from hyper_parallel.errors import nearest


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("a path has no line breaks and no control characters")
    if any(len(part.encode()) > 255 for part in text.split("/")) or len(text) > 4000:
        raise ValueError("a path, or a name in it, is longer than files' names can be")
    return text


PathText = Annotated[str, AfterValidator(_one_line)]
"""The path of a file or folder."""
PositiveInt = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
_MOST_HINTS = 50


class Section(BaseModel):
    """A section of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys of other tools, and keys of another section, with what to write in their place."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Reports unknown keys, each with the nearest valid name, together with the problems of known keys."""
        known = {key for name, field in cls.model_fields.items() for key in keys_of(name, field)}
        strange = [key for key in (given if isinstance(given, Mapping) else ()) if key not in known]
        # Finding the nearest name takes time, and a thousand hints help no one.
        unknown = {
            key: cls._hint(str(key), known) if place < _MOST_HINTS else "unknown key"
            for place, key in enumerate(strange)
        }
        if not unknown:
            return handler(given)
        problems: list[InitErrorDetails] = [
            {
                "type": PydanticCustomError("unknown_key", "{hint}", {"hint": hint}),
                "loc": (str(key),),
                "input": key,
            }
            for key, hint in unknown.items()
        ]
        try:
            handler({key: value for key, value in given.items() if key in known})
        except ValidationError as error:
            for detail in error.errors():
                # A key that is missing because it was misspelt is reported once.
                if detail["type"] == "missing" and any(
                    repr(detail["loc"][-1]) in h for h in unknown.values()
                ):
                    continue
                context = {**detail.get("ctx", {}), "told": detail["msg"]}
                problems.append(
                    {
                        "type": PydanticCustomError(detail["type"], "{told}", context),
                        "loc": detail["loc"],
                        "input": detail["input"],
                    }
                )
        raise ValidationError.from_exception_data(cls.__name__, problems)

    @classmethod
    def _hint(cls, key: str, known: set[str]) -> str:
        if key in cls.elsewhere:
            return f"unknown key; {cls.elsewhere[key]}"
        written = [
            name for name in known if name not in cls.model_fields or not cls.model_fields[name].exclude
        ]
        hint = nearest(key, written) or f"; the keys here are {', '.join(sorted(written))}"
        return f"unknown key{hint}"


def keys_of(name: str, field: FieldInfo) -> list[str]:
    """The keys under which a file may set a field."""
    if isinstance(field.validation_alias, AliasChoices):
        return [str(choice) for choice in field.validation_alias.choices]
    return [field.alias or name]
