"""Which submodel each module of a model belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from hyper_parallel.errors import StrategyError, nearest
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.strategy.submodels import Submodel


def assigned_modules(model: nn.Module, submodels: Mapping[str, Submodel]) -> dict[str, int]:
    """Names of modules to the places of their submodels, in the order of `submodels`; what a module contains belongs to
    it. "" is the submodel that has all others, if there is one.

    Raises StrategyError for a module that the model does not have or that two submodels name, for several submodels
    without modules, and for weights that no submodel has.
    """
    known = dict(model.named_modules())
    found: dict[str, int] = {}
    rest = [name for name, one in submodels.items() if not one.modules]
    if len(rest) > 1:
        raise StrategyError(
            f"submodels: {' and '.join(rest)} name no modules; one of them may have all others, and the rest must "
            "name theirs (modules)"
        )
    for place, (name, one) in enumerate(submodels.items()):
        for module in one.modules:
            if module not in known or not module:
                raise StrategyError(
                    f"submodels.{name}: the model has no module {module!r}{nearest(module, filter(None, known))}"
                )
            for other, taken in found.items():
                if f"{module}.".startswith(f"{other}.") or f"{other}.".startswith(f"{module}."):
                    raise StrategyError(
                        f"submodels.{name}: {module!r} overlaps {other!r} of {list(submodels)[taken]}; give each "
                        "module to one submodel"
                    )
            found[module] = place
    if rest:
        found[""] = list(submodels).index(rest[0])
    _check_weights(model, submodels, found)
    return found


def submodel_of(assigned: Mapping[str, int]) -> Callable[[str], int | None]:
    """The submodel of a module by its name, with `assigned` as of `assigned_modules`; None for a module that contains
    several: its own code joins their values, and belongs where these are.

    >>> of = submodel_of({"model.vision_tower": 0, "": 1})
    >>> of("model.vision_tower.layers.0"), of("model.language_model"), of("model")
    (0, 1, None)
    """
    containing = {""} | {
        module[:at] for module in assigned for at, letter in enumerate(module) if letter == "."
    }

    def found(module: str) -> int | None:
        return None if module in containing and module not in assigned.keys() - {""} else of(module)

    of = by_modules(assigned)
    return found


def _check_weights(model: nn.Module, submodels: Mapping[str, Submodel], found: Mapping[str, int]) -> None:
    """Every weight has a submodel, and every submodel a weight."""
    having: set[int] = set()
    for weight, _ in model.named_parameters():
        owners = [
            place for module, place in found.items() if module and f"{weight}.".startswith(f"{module}.")
        ]
        if not owners and "" not in found:
            raise StrategyError(
                f"submodels: no submodel has {weight!r}; name its module in one, or leave modules out in one, which "
                "then has all others"
            )
        having.add(owners[0] if owners else found[""])
    for place, name in enumerate(submodels):
        if place not in having:
            raise StrategyError(f"submodels.{name}: no weights are left for it; leave it out")
