"""Methods of a Trainer that a class of the user's has in place of ours and Transformers': reached, or refused by name.

What a Trainer calls is called as ever, so that overrides are honoured; this names those that nothing would call.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.errors import IntegrationError

_OWNERS = ("hyper_parallel", "transformers", "trl", "llamafactory")
NEVER_CALLED = {
    "get_cp_size": "the strategy's axes say how positions are split",
    "get_tp_size": "the strategy's axes say how weights are split",
    "_save": "the ranks write a model's folder together; override save_model, which calls super().save_model",
    "hyperparameter_search": "every trial would spread a model anew; start a run for each trial",
}
WITHOUT_PIPELINE = dict.fromkeys(
    (
        *("training_step", "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager"),
        "_prepare_context_parallel_inputs",
    ),
    "the stages compute the model's own next-token loss of all micro-batches together",
)


def owner_of(trainer: Any, name: str) -> type | None:
    """The class of the user's whose method `name` a Trainer has; None where it is a library's."""
    found = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    if found is None or found.__module__.partition(".")[0] in _OWNERS:
        return None
    return found


def check_overrides(trainer: Any, *, pipeline: bool) -> None:
    """Refuse overrides that nothing would call. Raises IntegrationError for the first."""
    for name, why in {**NEVER_CALLED, **(WITHOUT_PIPELINE if pipeline else {})}.items():
        if (kind := owner_of(trainer, name)) is not None:
            mend = "; leave it out, or set axes.pipeline to 1" if name not in NEVER_CALLED else ""
            raise IntegrationError(f"{kind.__name__}.{name} would not be called: {why}{mend}")
