"""The Strategy: declares how a model is parallelized, independent of the model.

The sections `context`, `precision`, `overlap` and `expert_balance` are here, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from hyper_parallel.strategy.axes import AUTO, OPEN_NAMES, Axes, Placement, Submodel
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.strategy.pipeline import Pipeline
from hyper_parallel.strategy.section import Section

Method = Literal["auto", "ring", "ulysses", "hybrid"]


class Context(Section):
    """Method of context parallelism."""

    method: Method = "auto"
    """`ring`: keys and values travel from rank to rank; positions are distributed so that each rank has the same work
    under a causal mask. `ulysses`: an all-to-all exchanges heads for positions. `hybrid`: Ulysses inside, rings
    outside. `auto`: Ulysses over the largest divisor of the axis that divides the key-value heads, rings over the rest.
    """
    ulysses: Annotated[int, Field(ge=2, strict=True)] | None = None
    """With `hybrid`: the number of ranks that exchange heads, a divisor of axes.context. Default: the largest divisor
    that also divides the key-value heads of a rank.
    """

    @model_validator(mode="after")
    def _only_with_hybrid(self) -> Context:
        if self.ulysses is not None and self.method != "hybrid":
            raise ValueError(
                f"'ulysses' is the degree of Ulysses inside rings, and method is {self.method}; "
                "set method: hybrid, or leave ulysses out"
            )
        return self


Dtype = Literal["float32", "bfloat16"]


class Precision(Section):
    """Mixed precision: parameters and optimizer state are kept in `param`, arithmetic is done in `compute`."""

    param: Dtype = "float32"
    """The dtype in which parameters and optimizer state are kept."""
    compute: Dtype = "float32"
    """The dtype of a module's weights and activations during computation."""
    reduce: Dtype = "float32"
    """The dtype in which gradients are summed over the data axes."""
    modules: dict[str, Dtype] = Field(default_factory=dict)
    """Module pattern to compute dtype, for modules that need more precision, e.g. ``{"*norm*": float32}``.
    A pattern that matches no module is an error; where several match, the last one wins."""


class Overlap(Section):
    """Overlap of communication with computation, in a step that runs from its graph."""

    schedule: Literal["auto", "usual", "none"] = "auto"
    """`auto` simulates schedules of the step on `cluster` and takes the fastest if it beats the order of the model's
    code. `usual` is FSDP2's schedule, without simulation: weights are gathered one layer ahead, and gradients are
    reduced during the next layer. `none` keeps the order of the model's code.
    """
    cluster: str | None = None
    """The machine that `auto` simulates: a preset such as `h100`, or a cluster file such as `hyper-parallel calibrate`
    writes. Default: the device's preset; without one, `auto` is `usual`."""
    pieces: bool = False
    """Let `auto` split collectives of rows into chunks, each overlapped with the matrix product of another chunk.
    Results are then equal up to rounding, since a kernel may sum in another order for another number of rows; without
    chunks they are equal bit for bit.
    """

    @model_validator(mode="after")
    def _simulates(self) -> Overlap:
        if self.cluster is not None and self.schedule != "auto":
            raise ValueError(
                f"'cluster' is what 'schedule: auto' simulates, and schedule is {self.schedule}; "
                "set schedule to auto, or leave cluster out"
            )
        if self.pieces and self.schedule != "auto":
            raise ValueError(
                f"'pieces' is for 'schedule: auto', which finds out whether they pay, and schedule is {self.schedule}; "
                "set schedule to auto, or leave pieces out"
            )
        return self


class ExpertBalance(Section):
    """Expert load balancing: experts move to other ranks of the `expert` axis, and hot ones have replicas, by the rows
    that each expert got (EPLB). The results equal those without it."""

    every: Annotated[int, Field(ge=1)] = 50
    """Number of steps over which rows are counted; after them experts are placed anew, if `limit` is exceeded."""
    limit: Annotated[float, Field(gt=1)] = 1.15
    """The heaviest rank's rows over the mean, in each layer, up to which experts stay where they are."""
    replicas: Annotated[int, Field(ge=0)] = 2
    """Number of experts in each layer, the hottest, whose weights are copied to every rank of the `expert` axis in each
    forward pass (redundant experts); their rows stay where they are. 0 only moves experts.
    """


RuleName = Literal[
    "colwise", "colwise_gather", "rowwise", "vocab", "shared", "norm", "replicate", "expert", "expert_tensor"
]
"""Rules: how a module's weights are split over the `tensor` axis:

- `colwise`: output features are split; the output stays split.
- `colwise_gather`: output features are split; the output is gathered.
- `rowwise`: input features are split; the output is summed over the axis.
- `vocab`: an embedding's rows are split; the output is summed over the axis.
- `shared`: kept whole, and applied to features that `colwise` modules split (a norm per head): gradients are summed.
- `norm`: a norm over the features that `colwise` modules split: so are its weights, and its statistics are summed.
- `replicate`: kept whole on each rank of the axis, and applied to whole activations.

and for the experts of a mixture-of-experts layer:

- `expert`: experts are split over the `expert` axis, and tokens are sent to them. The default if that axis is above 1.
- `expert_tensor`: each expert's features are split over the tensor axes. The default if `expert` is 1. With `expert`
  above 1 it does both: `expert` then folds over shard and context only.
"""


CHOSEN: tuple[tuple[str, ...], ...] = (
    ("sequence",),
    ("context", "method"),
    ("memory", "device"),
    ("memory", "shard"),
    ("memory", "recompute"),
    ("pipeline", "schedule"),
    ("pipeline", "virtual"),
)
"""Keys besides the axes that the planner chooses if axes are open and the file leaves the keys out; those of `pipeline`
if that axis is open.
"""


BUDGET = "memory.device"
"""Of the keys that the planner chooses the one for the budgets of all tiers. It stays without where nothing has to lie
on the host, or would be faster there."""


class Strategy(Section):
    """Declaration of how a model is parallelized and computed; serializable, comparable and repeatable.

    >>> Strategy(axes={"shard": 2, "tensor": 2}, sequence=True).axes.world
    4
    """

    plans_memory: ClassVar[bool] = True
    """Whether `memory.device: auto` is for the planner."""

    version: Literal[1] = 1
    """The version of the file's format."""
    axes: Axes = Axes()
    """The degrees of the mesh axes, outer to inner."""
    placement: Placement = Placement()
    """The link level of each axis. If set, it determines the order of the ranks, level by level."""
    context: Context = Context()
    """Context parallelism: the method that splits positions over the `context` axis."""
    pipeline: Pipeline = Pipeline()
    """Pipeline parallelism: the schedule and the layers of the stages."""
    submodels: dict[str, Submodel] = Field(default_factory=dict)
    """Name to a part of the model on its own devices, in the place of `axes` (docs/multimodal.md)."""
    sequence: bool = False
    """Shard activations between blocks along the sequence, over the tensor axis."""
    rules: dict[str, RuleName] = Field(default_factory=dict)
    """Module pattern to rule; overrides the rules inferred from the model. `*` matches one or more parts of a dotted
    name. A pattern that matches no module is an error; where several match, the last one wins.
    """
    expert_replicas: dict[str, Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    """Pattern of experts modules to the indices of hot experts, e.g. ``{"model.layers.*.mlp.experts": [5, 17]}``: their
    weights are copied to every rank of the `expert` axis in each step, and their tokens stay where they are. The
    results equal those without replicas.
    """
    expert_balance: ExpertBalance | None = None
    """Expert load balancing: experts are placed on the ranks of the `expert` axis, and replicated, by measured loads.
    Default: each stays where it is.
    """
    precision: Precision = Precision()
    """Dtypes of parameters, arithmetic and gradient reduction."""
    memory: Memory = Memory()
    """ZeRO level, recomputation, and memory budget."""
    overlap: Overlap = Overlap()
    """Scheduling of collectives in parallel with computation."""
    check: bool = True
    """Region check before training: run the model whole and split, on random numbers and small sizes, and refuse the
    strategy if gradients differ. Takes seconds the first time; passed checks are cached.
    """
    cluster: str | None = None
    """The machine for which open axes are planned: a preset such as `h100`, or a file that `hyper-parallel calibrate`
    wrote. Default: the device's preset; on a CPU this machine, which is measured once.
    """
    tries: Annotated[int, Field(ge=0)] | None = None
    """Number of strategies with similar predicted times that the workers try before the run, a few steps each; the
    fastest is used. Default: 6 on CPUs, none on accelerators. Under a memory budget each is tried within it.
    """
    tries_seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds that these trials may take together. Default: 120."""
    chosen: tuple[str, ...] = Field(default=(), json_schema_extra={"readOnly": True})
    """The keys that the planner chooses besides open axes, derived from what the file leaves out; do not set it."""

    @model_validator(mode="before")
    @classmethod
    def _read_what_is_open(cls, given: Any) -> Any:
        """`auto` for the whole section leaves the axes open; if axes are open, keys of `CHOSEN` that are left out are
        open too.
        """
        if given == AUTO:
            given = {"axes": AUTO}
        if not isinstance(given, Mapping) or "chosen" in given:
            return given
        given, filled = _memory_auto(given) if cls.plans_memory else (given, False)
        axes = given.get("axes")
        if axes == AUTO:
            axes = dict.fromkeys(OPEN_NAMES, AUTO)
        opened: Collection[str] = axes.open if isinstance(axes, Axes) else ()
        if isinstance(axes, Mapping):
            opened = [axis for axis, degree in axes.items() if degree == AUTO]
        if not opened:
            if not filled:
                return given
            again = () if _has(given, ("memory", "recompute")) else ("memory.recompute",)
            return {**given, "chosen": (BUDGET, *again)}
        left = [
            path
            for path in CHOSEN
            if not _has(given, path) and ("pipeline" in opened or path[0] != "pipeline")
        ]
        if _has(given, ("memory", "reshard_after_forward")):
            # The key applies to `shard: parameters` only, so that leaving `shard` out selects that level.
            left.remove(("memory", "shard"))
        return {**given, "chosen": tuple(".".join(path) for path in left)}

    @model_validator(mode="after")
    def _pipeline_has_ranks(self) -> Strategy:
        if self.pipeline != Pipeline() and self.axes.pipeline == 1 and "pipeline" not in self.axes.open:
            raise ValueError(
                "section 'pipeline' says how the stages of a pipeline run, and axes.pipeline is 1; set axes.pipeline "
                "to the number of device groups, or leave the section out"
            )
        return self

    @model_validator(mode="after")
    def _submodels_have_the_axes(self) -> Strategy:
        if self.submodels and (self.axes.world > 1 or self.axes.open):
            raise ValueError(
                f"'axes' ({self.axes.product or 'auto'}) are those of each of the 'submodels'; write them there"
            )
        if len(self.submodels) == 1:
            raise ValueError(
                "'submodels' names one part; name at least two, or use 'axes' for a model as a whole"
            )
        return self

    @property
    def world(self) -> int:
        """The number of ranks: of the axes, or of all submodels."""
        return sum(one.axes.world for one in self.submodels.values()) if self.submodels else self.axes.world

    @property
    def product(self) -> str:
        """The degrees above 1, in words."""
        if not self.submodels:
            return self.axes.product
        return " + ".join(f"{name} {one.axes.world}" for name, one in self.submodels.items())

    @property
    def of_stage(self) -> Strategy:
        """The strategy of one device group of the pipeline: the same without the pipeline."""
        if self.axes.pipeline == 1:
            return self
        axes = self.axes.model_copy(update={"pipeline": 1, "outside": 0})
        return self.model_copy(update={"axes": axes, "pipeline": Pipeline()})

    @property
    def on_one_device(self) -> Strategy:
        """The same with all axes 1, for a run on one device."""
        # Nothing is gathered on one device, so that nothing can be gathered again.
        memory = self.memory.model_copy(update={"gathered": "keep"})
        settled = {
            "chosen": (),
            "cluster": None,
            "tries": None,
            "tries_seconds": None,
            "expert_balance": None,
        }
        return self.model_copy(
            update={"axes": Axes(), "submodels": {}, "sequence": False, "memory": memory, **settled}
        )

    @property
    def open(self) -> bool:
        """Whether the planner has to choose axes, or a memory budget, before anything can run."""
        return bool(self.axes.open) or BUDGET in self.chosen

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        left_out = set() if self.open else {"chosen"}
        if self.axes.pipeline == 1 and "pipeline" not in self.axes.open:
            left_out.add("pipeline")
        if not self.submodels:
            left_out.add("submodels")
        return {key: value for key, value in found.items() if key not in left_out}

    @field_validator("expert_replicas")
    @classmethod
    def _once(cls, replicas: dict[str, list[int]]) -> dict[str, list[int]]:
        for pattern, experts in replicas.items():
            if len(set(experts)) != len(experts):
                raise ValueError(f"{pattern!r} names an expert twice: {experts}; name each once")
        return replicas

    @model_validator(mode="after")
    def _experts_can_move(self) -> Strategy:
        if self.expert_balance is None:
            return self
        if self.expert_replicas:
            raise ValueError(
                "'expert_replicas' names hot experts, and 'expert_balance' finds them by their loads; leave one out"
            )
        if self.open:
            raise ValueError(
                "'expert_balance' places experts on the ranks of axes.expert, and 'auto' leaves keys to the planner; "
                "write the degrees of the axes and the memory, or leave expert_balance out"
            )
        if self.axes.pipeline > 1:
            raise ValueError(
                f"'expert_balance' places experts on the ranks of one device group, and axes.pipeline is "
                f"{self.axes.pipeline}; set it to 1, or name hot experts in expert_replicas instead"
            )
        if self.memory.device is not None:
            raise ValueError(
                "'expert_balance' moves experts between steps, for which the plan of a memory budget has no memory; "
                "leave memory.device out, or name hot experts in expert_replicas instead"
            )
        return self

    @model_validator(mode="after")
    def _open_or_not(self) -> Strategy:
        if self.open and self.placement.placed:
            raise ValueError(
                "placement says on which level each axis lies, and 'auto' leaves axes open; leave the axes out of "
                "placement (its devices may stay), or write their degrees"
            )
        for key, does in (
            ("cluster", "is the machine by which"),
            ("tries", "says how"),
            ("tries_seconds", "says how long"),
        ):
            if getattr(self, key) is not None and not (self.open or self.chosen):
                raise ValueError(
                    f"{key!r} {does} open axes are planned, and every degree is written; leave it out, or set axes "
                    "to auto"
                )
        return self

    @model_validator(mode="after")
    def _placed_axes_in_order(self) -> Strategy:
        order = self.placement.order(self.axes)
        if order != self.axes.order:
            # Frozen for everybody else: the order of the axes is settled while the Strategy is made.
            object.__setattr__(self, "axes", self.axes.model_copy(update={"order": order}))
        return self


def _memory_auto(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """A file's strategy with `memory: auto`, or `memory.device: auto`, left out; and whether it was there."""
    memory = given.get("memory")
    if memory == AUTO:
        memory = {"device": AUTO}
    if not isinstance(memory, Mapping) or memory.get("device") != AUTO:
        return given, False
    elsewhere = [name for name in ("host", "pool", "flash") if name in memory]
    if elsewhere:
        raise ValueError(
            f"'memory.device: auto' leaves the bytes of every tier to the planner, and 'memory.{elsewhere[0]}' is "
            "written; leave it out, or write device too"
        )
    return {**given, "memory": {key: value for key, value in memory.items() if key != "device"}}, True


def _has(given: Any, path: tuple[str, ...]) -> bool:
    """Whether a file sets a key."""
    for key in path:
        if not isinstance(given, Mapping) or key not in given:
            return False
        given = given[key]
    return True
