"""Submodels: parts of a model on devices of their own, each with its own axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy.axes import Axes
from hyper_parallel.strategy.section import Section


class Submodel(Section):
    """A part of a model, and the devices that compute it.

    >>> Submodel(modules=["model.vision_tower"], devices=2).axes.replicate
    2
    """

    modules: tuple[str, ...] = ()
    """Names of modules, each with all that it contains. One submodel may leave them out: it has all others."""
    axes: Axes = Axes()
    """The degrees of the mesh axes of its devices. `pipeline` is for the submodel with the decoder's layers."""
    devices: Annotated[int, Field(ge=1)] | None = None
    """Number of devices: the product of the axes. Without axes they are copies for different rows (`replicate`)."""

    @model_validator(mode="before")
    @classmethod
    def _copies(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("devices") and not given.get("axes"):
            return {**given, "axes": {"replicate": given["devices"]}}
        return given

    @model_validator(mode="after")
    def _filled(self) -> Submodel:
        if self.devices is not None and self.devices != self.axes.world:
            raise ValueError(
                f"devices is {self.devices}, and the axes multiply to {self.axes.world} "
                f"({self.axes.product or 'none is set'}); make them equal, or leave devices out"
            )
        if self.axes.open:
            raise ValueError("axes of a submodel cannot be 'auto'; write their degrees")
        return self


_SUBMODELS = TypeAdapter(dict[str, Submodel])


def read_submodels(given: Mapping[str, Submodel | Mapping[str, Any]]) -> dict[str, Submodel]:
    """Submodels by name, from sections or what they are read from. Raises StrategyError."""
    try:
        found = _SUBMODELS.validate_python(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("submodels", *first["loc"])))
        raise StrategyError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
    if len(found) < 2:
        raise StrategyError(
            f"submodels: {len(found)} of them; name at least two, or use hp.parallelize for a model as a whole"
        )
    return found
