"""Checkpoint state of a run, and the conditions of a resume.

Tensors: every parameter as ``model.<name>``, persistent buffers likewise, and what the optimizer declares. The
rest is JSON: steps done, rows consumed, seed, the optimizer's own state, the run file, the model's config and
the run's identity, with the tokenizer's files beside it, so that a checkpoint can be exported by itself.

The identity is what may not change on resume: seed, model and data. The text counts by its content and not by where it
lies; another one has to be allowed. Strategy, workers, batch, steps, schedule and learning rate may change.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hyper_parallel.checkpoint import Found, Piece, Ranks, Writer, file_format, newest, of_step, read
from hyper_parallel.checkpoint.adapters import MODEL, merge_state
from hyper_parallel.checkpoint.adapters import STATE as LORA
from hyper_parallel.checkpoint.durable import explain
from hyper_parallel.checkpoint.file_format import ASSETS
from hyper_parallel.checkpoint.rank_agreement import agree, ranks_of
from hyper_parallel.checkpoint.verify import (
    LARGEST_FINITE,
    LARGEST_WEIGHT,
    VERDICT,
    pass_over,
    read_marker,
    reason_to_pass_over,
)
from hyper_parallel.config import RunConfig
from hyper_parallel.data.export_assets import assets_of
from hyper_parallel.errors import CheckpointError, ConfigError
from hyper_parallel.layout import Layout
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.step.build import Built
from hyper_parallel.step.expert_balance import ExpertBalancer
from hyper_parallel.step.optimizer import Optimizer

FOLDER = "checkpoints"
"""The folder of a run's checkpoints, in its own."""


@dataclass
class RunState:
    """How far a run is. What a resumed one needs to continue, and to summarise the whole."""

    step: int = 0
    """Updates done."""
    consumed: int = 0
    """Rows of the data consumed."""
    tokens: int = 0
    """Positions computed."""
    initial_loss: float | None = None
    final_loss: float | None = None
    eval_before: float | None = None
    grad_norm: float | None = None
    """Of the last step whose loss and norm were finite, as is `final_loss`."""
    recent_losses: list[float] = field(default_factory=list)
    """Of the last healthy steps (`health`)."""
    healthy_batch: int | None = None
    """Rows consumed before the batch of the last healthy step."""
    ruined: str | None = None
    """Why the weights are ruined, in words; None while they are healthy."""
    skipped: int = 0
    """Steps without an update, since their loss or gradient norm was not finite."""
    left_out: list[list[int]] = field(default_factory=list)
    """Ranges of consumed rows that are passed over: batches that a rollback leaves out."""

    def begin_anew(self) -> None:
        """What was usual so far says nothing of what comes."""
        self.recent_losses, self.healthy_batch, self.ruined = [], None, None

    def leave_out(self, consumed: int, batch: int) -> int:
        """How many rows are consumed before the next batch may begin, `consumed` or more."""
        for start, stop in sorted(self.left_out):
            if consumed < stop and start < consumed + batch:
                consumed = stop
        return consumed


class _Choice(NamedTuple):
    """The checkpoint that a run goes on from."""

    found: Found | None
    notes: list[str]
    rewound: bool
    """The run is taken back to it."""


class RunCheckpoints:
    """The checkpoints of one run, as one rank sees them. Every rank calls the same methods in step."""

    def __init__(
        self, config: RunConfig, built: Built, optimizer: Optimizer, balancer: ExpertBalancer | None = None
    ) -> None:
        self._config, self._built, self._optimizer, self._balancer = config, built, optimizer, balancer
        self._handle: ShardedModel = sharded(built.model)
        self._folder = Path(config.out) / FOLDER
        self._assets = assets_of(config, built.text, built.generation) if self._handle.rank == 0 else {}
        self._writer: Writer | None = None
        self._last: Path | None = None
        """What was loaded, until something is saved."""
        self._at: int | None = None
        """The step that was saved or loaded last, unless it was found ruined."""

    def resume(self) -> tuple[RunState | None, list[str]]:
        """Load the newest verified checkpoint that is healthy, or the one of `checkpoint.resume_from`; the state it
        holds, None when there is none, and what to say.

        From here to `finish` no other run can write into the folder. Raises CheckpointError when one does, when
        the folder cannot be written, and when there are only damaged checkpoints; ConfigError when the checkpoint
        is of another seed, model or data, or when there is one and `checkpoint.resume` is false.
        """
        settings = self._config.checkpoint
        self._writer = Writer(
            self._folder,
            self._handle.world,
            self._handle.rank,
            # Whether the newest is healthy is known after the next step only: one that is proved to be stays.
            keep=max(settings.keep, 2),
            background=settings.background,
            # A budget leaves no room for a second copy of everything.
            streamed=self._built.budget is not None,
            group=_group(self._handle),
        )
        found, notes, rewound = self._chosen()
        if found is None:
            return None, []
        if not self._config.checkpoint.resume:
            raise ConfigError(
                f"{self._folder} holds the checkpoint of step {found.step} and checkpoint.resume is false; choose "
                "another 'out', remove the folder, or set checkpoint.resume=true to go on"
            )
        # Before the tensors, whose names and shapes would speak of a change less clearly.
        other_text = self._check(read_state(found.path), found.path)
        resumed = self._load(found)
        notes.append(f"resumed from {found.path} at step {found.step}")
        if rewound:
            notes += self._pass_over_newer(found)
            if resumed.ruined is not None or reason_to_pass_over(found.path) is not None:
                notes.append(f"its health is not good: {resumed.ruined or reason_to_pass_over(found.path)}")
                resumed.begin_anew()
        if other_text:
            resumed.consumed, resumed.left_out = 0, []
            resumed.begin_anew()
            notes.append(
                "the text is not that of before (checkpoint.allow_other_data): from its first row on"
            )
        return resumed, notes

    def _chosen(self) -> _Choice:
        resume_from, group = self._config.checkpoint.resume_from, _group(self._handle)
        found = None
        if resume_from is None or self._rewound_before():
            found = newest(self._folder, group=group)
            skipped = found.skipped if found is not None else ()
            notes = [f"passed over {path.name}: {reason}" for path, reason in skipped]
            if resume_from is not None:
                notes.append(
                    f"this very run was taken back to step {resume_from} before, and goes on from there"
                )
            return _Choice(found, notes, rewound=False)
        found = of_step(self._folder, resume_from, group=group)
        return _Choice(
            found, [f"passed over {path.name}: {reason}" for path, reason in found.skipped], rewound=True
        )

    def _rewound_before(self) -> bool:
        """Whether the newest checkpoint that is not to be passed over was written by this very run file."""
        matches = False
        if self._handle.rank == 0:
            for name in file_format.committed(self._folder):
                path = self._folder / str(name)
                if reason_to_pass_over(path) is None:
                    with contextlib.suppress(CheckpointError):
                        matches = read_marker(path)["state"].get("config") == self._config.model_dump(
                            mode="json"
                        )
                        break
        return bool(json.loads(agree(self._ranks(), None, json.dumps(matches))))

    def _load(self, found: Found) -> RunState:
        state = self._read(found.path)
        try:
            self._optimizer.load_state(state["optimizer"])
            if self._balancer is not None:
                self._balancer.load_state(state.get("experts"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{found.path}: the state of its optimizer or experts is none that a run writes"
            ) from error
        self._last, self._at = found.path, found.step
        return RunState(**state["run"])

    def _read(self, path: Path) -> dict[str, Any]:
        """Fill this rank's pieces; the state. A collective."""
        pieces, rank = self._pieces(), self._handle.rank
        if self._handle.pipeline is None:
            return read(path, pieces, rank=rank)
        ranks = self._ranks()
        everywhere = {name for told in ranks.gather(json.dumps(list(pieces))) for name in json.loads(told)}
        state, problem = {}, None
        try:
            state = read(path, pieces, rank=rank, elsewhere=everywhere - pieces.keys())
        except CheckpointError as error:
            problem = error
        # A tensor of another shape is seen only by the ranks that hold it.
        agree(ranks, problem)
        return state

    def _pass_over_newer(self, found: Found) -> list[str]:
        """Have the checkpoints that are newer than this one passed over from now on; what to say."""
        chosen = next(name for name in file_format.committed(self._folder) if str(name) == found.path.name)
        newer = [self._folder / str(name) for name in file_format.committed(self._folder) if name > chosen]
        live = [path for path in newer if reason_to_pass_over(path) is None]
        self._mark(live, f"the run was taken back to step {found.step}")
        listed = ", ".join(path.name for path in reversed(live))
        return [f"passed over from now on: {listed}"] if live else []

    def _mark(self, paths: list[Path], why: str) -> None:
        """Have checkpoints passed over from now on. A collective; `paths` are those of rank 0."""
        error = None
        for path in paths if self._handle.rank == 0 else ():
            try:
                pass_over(path, why)
            except OSError as problem:
                error = explain(problem, path / VERDICT)
        agree(self._ranks(), error)

    def _ranks(self) -> Ranks:
        return ranks_of(_group(self._handle), self._handle.world, self._handle.rank)

    def ruined(self, step: int, why: str) -> str | None:
        """The weights after `step` updates are ruined: have their checkpoint passed over, if there is one; what to say.

        Waits for what is being written. A collective.
        """
        if self._at != step:
            return None
        assert self._writer is not None, "something was saved, or resumed from"
        written = self._writer.wait()
        path = self._last or written
        assert path is not None, "something was saved, or resumed from"
        self._mark([path], f"ruined: {why}")
        self._at = None
        return f"the weights are ruined ({why}); {path.name} is passed over from now on"

    def go_back(self) -> tuple[RunState, list[str]]:
        """Load the newest healthy checkpoint in the middle of a run; the state it holds, and what to say. A collective.

        Raises CheckpointError where there is none.
        """
        assert self._writer is not None, "resume comes first"
        self._writer.wait()
        found = newest(self._folder, group=_group(self._handle))
        if found is None:
            raise CheckpointError(
                f"{self._folder} holds no checkpoint to go back to; make checkpoint.every shorter"
            )
        notes = [f"passed over {path.name}: {reason}" for path, reason in found.skipped]
        state = self._load(found)
        return state, [*notes, f"went back to {found.path}"]

    def save(self, state: RunState) -> None:
        """Save the values as they are now; writing goes on in the background where the run file says so."""
        assert self._writer is not None, "resume comes first"
        self._at, self._last = state.step, None
        self._writer.save(
            state.step,
            self._pieces(),
            {
                "run": asdict(state),
                "health": {
                    "loss": state.final_loss,
                    "grad_norm": state.grad_norm,
                    "recent_losses": state.recent_losses,
                    "ruined": state.ruined,
                },
                "optimizer": self._optimizer.state(),
                **({"experts": self._balancer.state()} if self._balancer is not None else {}),
                "identity": self._identity(),
                "config": self._config.model_dump(mode="json"),
                "model_config": self._built.model_config,
                **({LORA: merge} if (merge := merge_state(self._built.model)) is not None else {}),
            },
            assets=self._assets,
            largest=self._largest(),
        )

    def finish(self) -> Path | None:
        """Wait for what is being written and let other runs write; the newest checkpoint, the one resumed from if
        none was written.
        """
        if self._writer is not None:
            try:
                written = self._writer.wait()
                self._last = self._last or written
            finally:
                self._writer.close()
        return self._last

    def _pieces(self) -> dict[str, Piece]:
        return {**model_shards(self._handle), **self._optimizer.pieces()}

    def _largest(self) -> dict[str, float]:
        """Name of a trained weight, or of its optimizer state, to the largest number that a step can compute with."""
        trained = {f"{MODEL}{p.name}" for p in self._handle.owned() if p.parameter.requires_grad}
        state = {name for name, piece in self._optimizer.pieces().items() if piece.local.is_floating_point()}
        return {**dict.fromkeys(trained, LARGEST_WEIGHT), **dict.fromkeys(state, LARGEST_FINITE)}

    def _identity(self) -> dict[str, Any]:
        ours = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "_attn_implementation"}
        model = {k: v for k, v in (self._built.model_config or {}).items() if k not in ours}
        text, optimizer = self._built.text, self._config.train.optimizer
        return {
            "seed": self._config.seed,
            "train.optimizer.name": optimizer.name,
            **{f"train.optimizer.{key}": getattr(optimizer, key) for key in optimizer.KEYS_OF_STATE},
            **{f"model.config.{key}": value for key, value in model.items()},
            "the tokenizer's digest": text.tokenizer.digest,
            **text.identity,
        }

    def _check(self, state: dict[str, Any], path: Path) -> bool:
        """Whether the text is another one, which the run file allows. Raises ConfigError for what may not change."""
        then, now, text = state["identity"], self._identity(), self._built.text.identity
        differ = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        of_text = [key for key in differ if key in text]
        allowed = self._config.checkpoint.allow_other_data
        refused = [key for key in differ if not (allowed and key in text)]
        if not refused:
            return bool(of_text)
        changes = "; ".join(f"{key} was {then.get(key)!r} and is {now.get(key)!r}" for key in refused[:4])
        more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
        mend = "Put them back to go on, or choose another 'out'"
        if "the tokenizer's digest" in refused and allowed:
            mend = f"Give the tokenizer that the run began with: data.tokenizer.path={path / ASSETS}"
        elif of_text and not allowed:
            mend += "; checkpoint.allow_other_data=true goes on with the other text, from its first row"
        raise ConfigError(f"{path} is of another run: {changes}{more}. {mend}")


def model_shards(handle: ShardedModel) -> dict[str, Piece]:
    """Every parameter and persistent buffer as this rank holds it, by its name in a checkpoint: ``model.<name>``."""
    pieces = {f"{MODEL}{p.name}": Piece(p.local, p.layout, p.owners) for p in handle.owned()}
    for name, buffer in _persistent_buffers(handle.model):
        if handle.pipeline is None or handle.pipeline.owns(name):
            layout = Layout.replicated(handle.mesh, tuple(buffer.shape))
            pieces[f"{MODEL}{name}"] = Piece(buffer, layout, handle.owners(name))
    return pieces


def model_names(handle: ShardedModel) -> list[str]:
    """The names in a checkpoint of every parameter and persistent buffer of the model, in one order on all ranks."""
    buffers = [name for name, _ in _persistent_buffers(handle.model)]
    return [f"{MODEL}{name}" for name in (*(p.name for p in handle.parameters()), *buffers)]


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state of a run's checkpoint. Raises CheckpointError if it was not written by a run."""
    from hyper_parallel.checkpoint.reader import Checkpoint

    state = Checkpoint(path).state
    if not {"run", "optimizer", "identity"} <= state.keys():
        raise CheckpointError(f"{path} was not written by a training run; choose another 'out'")
    run = state["run"]
    counts = [run.get(key) for key in ("step", "consumed", "tokens")] if isinstance(run, dict) else [None]
    sections = all(isinstance(state[key], dict) for key in ("optimizer", "identity"))
    known = {field.name for field in fields(RunState)}
    if not sections or not all(type(count) is int and count >= 0 for count in counts) or run.keys() - known:
        raise CheckpointError(f"{path}: its state is none that a training run writes; choose another 'out'")
    return state


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Any]]:
    found = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found


def _group(handle: ShardedModel) -> Any:
    import torch.distributed as dist

    return dist.group.WORLD if handle.world > 1 else None
