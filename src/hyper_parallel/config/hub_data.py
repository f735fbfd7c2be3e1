"""A data set of the Hugging Face Hub in `data.train` and `data.eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Tag, model_validator

from hyper_parallel.errors import ConfigError
from hyper_parallel.hub.hub_id import PREFIX, HubId, parse_explicit
from hyper_parallel.strategy.section import PathText, Section


class HubData(Section):
    """A data set of the Hub, read with the library datasets; its rows are as those of JSON lines."""

    path: PathText
    """Its id: `org/name` or `org/name@revision`."""
    name: str | None = None
    """The subset, of a data set that has several."""
    split: str | None = None
    """The split. Default: `train`, and for `data.eval` `validation`, `eval` or `test`; or the only one."""

    @model_validator(mode="after")
    def _is_an_id(self) -> HubData:
        try:
            _ = self.hub_id
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if (
            self.split is not None
            and not self.split.replace("_", "").replace("-", "").replace(".", "").isalnum()
        ):
            raise ValueError(
                f"'split' ({self.split}) must be the name of one split; a part of one is not taken"
            )
        return self

    @classmethod
    def _hint(cls, key: str, known: set[str]) -> str:
        if key == "revision":
            return "unknown key; write the revision behind the id, as path: org/name@revision"
        return super()._hint(key, known)

    @property
    def hub_id(self) -> HubId:
        """The repository and its revision."""
        text = self.path if self.path.startswith(PREFIX) else PREFIX + self.path
        found = parse_explicit(text, "path")
        assert found is not None
        return found


def _kind(given: Any) -> str:
    return "section" if isinstance(given, Mapping | HubData) else "text"


def _kind_or_list(given: Any) -> str:
    return "list" if isinstance(given, list | tuple) else _kind(given)


# The kind of what is written says which is meant, so that a mistake is explained once.
DataPaths = Annotated[
    Annotated[PathText, Tag("text")]
    | Annotated[HubData, Tag("section")]
    | Annotated[
        list[
            Annotated[
                Annotated[PathText, Tag("text")] | Annotated[HubData, Tag("section")], Discriminator(_kind)
            ]
        ],
        Tag("list"),
    ],
    Discriminator(_kind_or_list),
]
"""A path, ``hub:org/name``, the section of a data set, or a list of them."""


def as_hub(entry: str | HubData, key: str) -> HubData | None:
    """The data set that an entry means: ``hub:org/name``, or the section; None for a path.

    Raises ConfigError for ``hub:`` before something else than an id.
    """
    if isinstance(entry, HubData):
        return entry
    found = parse_explicit(entry, key)
    return None if found is None else HubData(path=str(found))
