"""LlamaFactory's arguments: the fields of `hyper_parallel_args`, the Strategy that they mean, and its own options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.compat import registry
from hyper_parallel.errors import IntegrationError, nearest
from hyper_parallel.integration.parallel_run import Given

MODES = ("none", "recompute", "swap")
DISPATCHER = "all_to_all"
"""The way in which tokens travel to experts. There is no other."""
DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
"""What a file may call a dtype to what a Strategy calls it."""
SIZES = ("tp_size", "cp_size", "pp_size", "ep_size", "fsdp_size", "efsdp_size")
_SAID_BY_A_FILE = (
    *SIZES,
    "activation_mode",
    "activation_swap_inputs",
    "param_dtype",
    "reduce_dtype",
    "reshard_after_forward",
    "memory",
)
"""Fields that a separate strategy says, so that they cannot stand beside one."""
_MEMORY = ("device", "host", "pool", "flash")


@dataclass
class HyperParallelArguments:
    """How LlamaFactory's user wants the model spread. Not frozen: LlamaFactory sets `cp_size` itself at times."""

    tp_size: int = 1
    """Ranks that split each matrix (tensor parallelism)."""
    cp_size: int = 1
    """Ranks that split each row's positions (context parallelism)."""
    pp_size: int = 1
    """Stages of the layers, each on different workers (pipeline parallelism)."""
    ep_size: int = 1
    """Ranks over which experts are spread. Not multiplied into the number of workers: it divides
    fsdp_size · cp_size · tp_size."""
    efsdp_size: int | None = None
    """How many ranks share the storage of one expert. It follows from the others; given, it is checked."""
    token_dispatcher: str = DISPATCHER
    """How tokens travel to experts; only `all_to_all`."""
    device_type: str = "auto"
    """The device that the run is meant for; another than the one it trains on is an error."""
    param_dtype: str | None = None
    """In which dtype parameters are gathered and computed with: bfloat16 or float32. Left out, bfloat16 with
    LlamaFactory's `bf16: true`, else float32."""
    reduce_dtype: str | None = None
    """In which dtype gradients are summed over ranks; left out, float32."""
    reshard_after_forward: bool | None = None
    """Free a layer's gathered parameters after its forward pass (true, which leaving it out means) or keep them."""
    fsdp_size: int | None = None
    """Ranks that share one copy of the parameters and see different rows; left out, all that remain."""
    activation_mode: str = "none"
    """`none`: as LlamaFactory's own options say. `recompute`: keep each layer's input and compute the layer again.
    `swap`: activations leave for the host's memory and come back."""
    activation_swap_inputs: bool = True
    """With `swap`: whether the inputs of layers may leave too."""
    strategy: str | dict[str, Any] | None = None
    """A Strategy of HyperParallel in place of all the above: the path of a file, its content, or `auto`."""
    memory: dict[str, Any] | None = None
    """What a step may hold: `{"device": "10GiB", "host": "64GiB", "flash": "./spill"}`."""

    @classmethod
    def from_dict(
        cls, given: Mapping[str, Any], source: str = "hyper_parallel_args"
    ) -> HyperParallelArguments:
        """From plain data, checked. `source` is named in errors. Raises IntegrationError."""
        if not isinstance(given, Mapping):
            raise IntegrationError(
                f'{source} must hold fields with values, such as {{"tp_size": 2}}; got {given!r}'
            )
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                hint = nearest(str(name), known) or f"; the fields are {', '.join(known)}"
                raise IntegrationError(f"{source}: unknown field {str(name)!r}{hint}")
        arguments = cls(**given)
        arguments.validate(source)
        return arguments

    @classmethod
    def from_finetuning_args(cls, finetuning_args: Any) -> HyperParallelArguments:
        """From `hyper_parallel_args` of LlamaFactory's arguments: a path to a JSON file, a mapping, or nothing.

        Raises IntegrationError.
        """
        given = getattr(finetuning_args, "hyper_parallel_args", None)
        if given is None:
            return cls()
        if isinstance(given, Mapping):
            return cls.from_dict(given)
        path = Path(given)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise IntegrationError(
                f"hyper_parallel_args is the path of a JSON file, and {given!r} cannot be read: {error.strerror}"
            ) from error
        except ValueError as error:
            raise IntegrationError(f"{given} is no JSON: {error}") from error
        return cls.from_dict(content, source=str(given))

    def validate(self, source: str = "hyper_parallel_args") -> None:
        """Raise IntegrationError, with one line that names the field, for what cannot be right on any machine."""
        for name in ("tp_size", "cp_size", "pp_size", "ep_size"):
            self._check_size(source, name)
        for name in ("fsdp_size", "efsdp_size"):
            if getattr(self, name) is not None:
                self._check_size(source, name)
        for name in ("param_dtype", "reduce_dtype"):
            self._check_dtype(source, name)
        for name in ("activation_swap_inputs", "reshard_after_forward"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "reshard_after_forward"):
                raise IntegrationError(f"{source}: {name} must be true or false; got {value!r}")
        self._check_choice(source, "activation_mode", MODES)
        if self.token_dispatcher != DISPATCHER:
            raise IntegrationError(
                f"{source}: token_dispatcher must be {DISPATCHER!r}, the only one that there is; "
                f"got {self.token_dispatcher!r}"
            )
        if not isinstance(self.device_type, str):
            raise IntegrationError(
                f"{source}: device_type must be the name of a device; got {self.device_type!r}"
            )
        if self.memory is not None:
            self._check_memory(source)
        if self.pp_size > 1 and (self.memory is not None or self.activation_mode == "swap"):
            raise IntegrationError(
                f"{source}: pp_size {self.pp_size} cannot be used with memory or activation_mode 'swap', which move "
                "what a whole step holds; use activation_mode 'recompute', or set pp_size to 1"
            )
        if self.strategy is not None:
            self._check_strategy(source)

    def _check_size(self, source: str, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise IntegrationError(f"{source}: {name} must be a whole number of at least 1; got {value!r}")

    def _check_choice(self, source: str, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            hint = nearest(str(value), choices)
            raise IntegrationError(
                f"{source}: {name} must be one of {', '.join(choices)}; got {value!r}{hint}"
            )

    def _check_dtype(self, source: str, name: str) -> None:
        value = getattr(self, name)
        if value is None or (isinstance(value, str) and value.removeprefix("torch.") in DTYPES):
            return
        known = ", ".join(dict.fromkeys(DTYPES.values()))
        hint = "; float16 would need its loss scaled" if value in ("float16", "fp16") else ""
        raise IntegrationError(f"{source}: {name} must be one of {known}; got {value!r}{hint}")

    def _check_memory(self, source: str) -> None:
        if not isinstance(self.memory, Mapping) or not self.memory:
            raise IntegrationError(
                f'{source}: memory must say what a step may hold, such as {{"device": "10GiB", "host": "64GiB"}}; '
                f"got {self.memory!r}"
            )
        for name in self.memory:
            if name not in _MEMORY:
                hint = nearest(str(name), _MEMORY) or f"; the fields are {', '.join(_MEMORY)}"
                raise IntegrationError(f"{source}: memory has an unknown field {str(name)!r}{hint}")
        if self.activation_mode != "none":
            raise IntegrationError(
                f"{source}: memory decides what is moved or computed again, and so does activation_mode "
                f"{self.activation_mode!r}; keep one of them"
            )

    def _check_strategy(self, source: str) -> None:
        if not isinstance(self.strategy, str | Mapping):
            raise IntegrationError(
                f"{source}: strategy must be the path of a file, its content, or 'auto'; got {self.strategy!r}"
            )
        # `auto` chooses sizes and nothing else that is written here.
        theirs = SIZES if self.strategy == "auto" else _SAID_BY_A_FILE
        both = [
            field.name
            for field in fields(self)
            if field.name in theirs and getattr(self, field.name) != field.default
        ]
        if both:
            raise IntegrationError(
                f"{source}: {' and '.join(both)} cannot stand beside strategy, which says it; leave out either"
            )


# HyperParallelArguments as a Strategy.
#
#     world = pp_size · replicate · fsdp_size · cp_size · tp_size
#     fsdp_size left out: world ÷ (pp_size · cp_size · tp_size)
#     efsdp_size · ep_size = fsdp_size · cp_size · tp_size
#
# Only what is written goes into the Strategy; the trainer fills in the rest from LlamaFactory's own options.


def strategy_from_arguments(
    arguments: HyperParallelArguments, world: int, *, checkpoints: bool = False
) -> Given:
    """The argument of `integration.parallel_run.strategy_of`: the user's own strategy, or one made of the fields.

    `checkpoints`: LlamaFactory's own gradient checkpointing is on, which holds where nothing here says otherwise.
    Raises IntegrationError for fields that are wrong, or that do not fit `world` workers.
    """
    arguments.validate()
    own = arguments.strategy
    if own is not None and own != "auto":
        return dict(own) if isinstance(own, Mapping) else Path(own)
    axes = "auto" if own == "auto" else _axes(arguments, world)
    return {"axes": axes, **_sections(arguments, checkpoints and own is None)}


def check_device(arguments: HyperParallelArguments, there: str) -> None:
    """Raise IntegrationError where `device_type` is not the device that the run trains on, or none at all."""
    meant = arguments.device_type
    known = ("auto", *registry.names())
    if meant not in known:
        hint = nearest(meant, known) or f"; known are {', '.join(known)}"
        raise IntegrationError(f"hyper_parallel_args: there is no device_type {meant!r}{hint}")
    if meant not in ("auto", there):
        raise IntegrationError(
            f"hyper_parallel_args: device_type is {meant!r}, and this run trains on {there!r}; install the driver and "
            f"the build of PyTorch for {meant}, or set device_type to 'auto'"
        )


def _axes(arguments: HyperParallelArguments, world: int) -> dict[str, int]:
    """Degrees, outer to inner. Raises IntegrationError where they do not multiply to `world`."""
    context, tensor, expert = arguments.cp_size, arguments.tp_size, arguments.ep_size
    stages = arguments.pp_size
    written = {"cp_size": context, "tp_size": tensor}
    if arguments.fsdp_size is not None:
        written = {"fsdp_size": arguments.fsdp_size, **written}
    written = {"pp_size": stages, **written}
    product = stages * context * tensor * (arguments.fsdp_size or 1)
    if world % product:
        sizes = " · ".join(f"{name} {size}" for name, size in written.items() if size > 1)
        raise IntegrationError(
            f"hyper_parallel_args: {sizes} = {product} does not divide the number of workers, {world}; start a "
            f"multiple of {product} workers, or make the sizes divide {world}"
        )
    rest = world // product
    shard = arguments.fsdp_size or rest
    axes = {
        "pipeline": stages,
        "replicate": world // (stages * shard * context * tensor),
        "shard": shard,
        "context": context,
        "tensor": tensor,
    }
    span = shard * context * tensor
    if span % expert:
        raise IntegrationError(
            f"hyper_parallel_args: ep_size {expert} does not divide fsdp_size · cp_size · tp_size = "
            f"{shard} · {context} · {tensor} = {span}; experts are spread over these workers"
        )
    if arguments.efsdp_size not in (None, span // expert):
        raise IntegrationError(
            f"hyper_parallel_args: efsdp_size is {arguments.efsdp_size}, and fsdp_size · cp_size · tp_size ÷ ep_size = "
            f"{shard} · {context} · {tensor} ÷ {expert} = {span // expert} workers share an expert; leave it out"
        )
    return {**axes, "expert": expert}


def _sections(arguments: HyperParallelArguments, checkpoints: bool) -> dict[str, Any]:
    """`precision` and `memory`, as far as they are written."""
    precision = {}
    if arguments.param_dtype is not None:
        precision["compute"] = DTYPES[arguments.param_dtype.removeprefix("torch.")]
    if arguments.reduce_dtype is not None:
        precision["reduce"] = DTYPES[arguments.reduce_dtype.removeprefix("torch.")]
    memory: dict[str, Any] = dict(arguments.memory or {})
    if arguments.reshard_after_forward is not None:
        memory["reshard_after_forward"] = arguments.reshard_after_forward
    own = arguments.activation_mode == "none" and arguments.memory is None and checkpoints
    if arguments.activation_mode == "recompute" or own:
        memory["recompute"] = "layer"
    return {**({"precision": precision} if precision else {}), **({"memory": memory} if memory else {})}


_WHOLE_MATRICES = {
    "use_galore": "GaLore",
    "use_apollo": "APOLLO",
    "use_adam_mini": "Adam-mini",
    "use_muon": "Muon",
}
"""Options that choose an optimizer whose update looks at whole matrices, rows or blocks."""
_PATCHED_BY = {
    "liger_kernel": "enable_liger_kernel",
    "unsloth": "use_unsloth",
    "MoD": "mixture_of_depths",
    "kt_kernel": "use_kt",
}
"""Packages that put passes of their own into a model to the options that ask for them."""


_OWN_LOSSES = ("use_dft_loss", "use_eaft_loss", "use_asft_loss")
_NEED_LOGITS = {**dict.fromkeys(_OWN_LOSSES, "loss"), "compute_accuracy": "metric"}
"""Options whose numbers are computed from whole logits."""


def check_stages(args: Any, finetuning_args: Any, stages: int) -> None:
    """Refuse what needs whole logits, which no worker has while `stages` run. Raises IntegrationError."""
    for option, what in _NEED_LOGITS.items():
        if stages > 1 and getattr(finetuning_args, option, False):
            raise IntegrationError(
                f"{option}: the {what} is computed from whole logits, which no worker has with pp_size {stages}; leave "
                "it out, or set pp_size to 1"
            )
    if stages > 1 and getattr(args, "predict_with_generate", False):
        raise IntegrationError(
            f"predict_with_generate: the stages of pp_size {stages} compute no text; leave it out and evaluate by the "
            "loss, or set pp_size to 1"
        )


def check_options(args: Any, finetuning_args: Any, model: nn.Module, world: int) -> None:
    """Refuse what cannot be honoured on a model that is spread over `world` workers. Raises IntegrationError."""
    if getattr(args, "fp8", False):
        raise IntegrationError("fp8 cannot be used with use_hyper_parallel; train in bfloat16 (bf16: true)")
    if getattr(finetuning_args, "use_badam", False):
        raise IntegrationError(
            "use_badam changes which parameters are trained as it goes, and a model is spread once; leave it out"
        )
    for option, name in _WHOLE_MATRICES.items():
        if getattr(finetuning_args, option, False) and world > 1:
            raise IntegrationError(
                f"{option}: {name} looks at whole matrices, of which each of the {world} workers has a part; leave it "
                "out, or train on one worker"
            )
    for module in model.modules():
        package = module.forward.__module__.partition(".")[0]
        if package in _PATCHED_BY:
            raise IntegrationError(
                f"{_PATCHED_BY[package]} puts passes of its own into {type(module).__name__}, which cannot be spread; "
                "leave it out"
            )


def without_checkpointing(model: nn.Module) -> bool:
    """Switch off LlamaFactory's gradient checkpointing, which knows nothing of a spread model; whether it was on."""
    seen: Any = model
    if not getattr(seen, "is_gradient_checkpointing", False):
        return False
    seen.gradient_checkpointing_disable()
    return True


def keep_document_numbers(data_collator: Any) -> None:
    """Let `neat_packing` tell documents by their numbers, [B, S], not by a mask [B, 1, S, S] that no axis can split."""
    if getattr(data_collator, "block_diag_attn", False):
        data_collator.block_diag_attn = False
