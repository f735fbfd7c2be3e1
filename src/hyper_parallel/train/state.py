"""What a checkpoint of a run holds, and when a run may go on from one.

Tensors: every parameter as ``model.<name>``, persistent buffers likewise, and what the optimizer declares. The
rest is JSON: steps done, rows consumed, seed, the optimizer's own state, the run file, the model's config and
the run's identity, with the tokenizer's files beside it, so that a checkpoint can be exported by itself.

The identity is what may not change on resume: seed, model and data. The text counts by its content and not by where it
lies; another one has to be allowed. Strategy, workers, batch, steps, schedule and learning rate may change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.checkpoint import Piece, Writer, newest, read
from hyper_parallel.checkpoint.export import MODEL
from hyper_parallel.checkpoint.names import ASSETS
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import CheckpointError, ConfigError
from hyper_parallel.layout import Layout
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.train.assets import assets_of
from hyper_parallel.train.build import Built
from hyper_parallel.train.optimizer import Optimizer

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


class RunCheckpoints:
    """The checkpoints of one run, as one rank sees them. Every rank calls the same methods in step."""

    def __init__(self, config: RunConfig, built: Built, optimizer: Optimizer) -> None:
        self._config, self._built, self._optimizer = config, built, optimizer
        self._handle: ShardedModel = sharded(built.model)
        self._folder = Path(config.out) / FOLDER
        self._assets = assets_of(config, built.text, built.generation) if self._handle.rank == 0 else {}
        self._writer: Writer | None = None
        self._last: Path | None = None

    def resume(self) -> tuple[RunState | None, list[str]]:
        """Load the newest verified checkpoint; the state it holds, None when there is none, and what to say.

        From here to `finish` no other run can write into the folder. Raises CheckpointError when one does, when
        the folder cannot be written, and when there are only damaged checkpoints; ConfigError when the checkpoint
        is of another seed, model or data, or when there is one and `checkpoint.resume` is false.
        """
        settings = self._config.checkpoint
        self._writer = Writer(
            self._folder,
            self._handle.mesh,
            self._handle.rank,
            keep=settings.keep,
            background=settings.background,
            # A budget leaves no room for a second copy of everything.
            streamed=self._built.budget is not None,
            group=_group(self._handle),
        )
        found = newest(self._folder, group=_group(self._handle))
        if found is None:
            return None, []
        if not self._config.checkpoint.resume:
            raise ConfigError(
                f"{self._folder} holds the checkpoint of step {found.step} and checkpoint.resume is false; choose "
                "another 'out', remove the folder, or set checkpoint.resume=true to go on"
            )
        notes = [f"passed over {path.name}: {reason}" for path, reason in found.skipped]
        pieces = self._pieces()
        # Before the tensors, whose names and shapes would speak of a change less clearly.
        other_text = self._check(read_state(found.path), found.path)
        state = read(found.path, pieces, rank=self._handle.rank)
        self._optimizer.load_state(state["optimizer"])
        self._last = found.path
        notes.append(f"resumed from {found.path} at step {found.step}")
        resumed = RunState(**state["run"])
        if other_text:
            resumed.consumed = 0
            notes.append(
                "the text is not that of before (checkpoint.allow_other_data): from its first row on"
            )
        return resumed, notes

    def save(self, state: RunState) -> None:
        """Save the values as they are now; writing goes on in the background where the run file says so."""
        assert self._writer is not None, "resume comes first"
        self._writer.save(
            state.step,
            self._pieces(),
            {
                "run": asdict(state),
                "optimizer": self._optimizer.state(),
                "identity": self._identity(),
                "config": self._config.model_dump(mode="json"),
                "model_config": self._built.model_config,
            },
            assets=self._assets,
        )

    def finish(self) -> Path | None:
        """Wait for what is being written and let other runs write; the newest checkpoint, the one resumed from if
        none was written.
        """
        if self._writer is not None:
            try:
                self._last = self._writer.wait() or self._last
            finally:
                self._writer.close()
        return self._last

    def _pieces(self) -> dict[str, Piece]:
        return {**model_pieces(self._handle), **self._optimizer.pieces()}

    def _identity(self) -> dict[str, Any]:
        ours = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "_attn_implementation"}
        model = {k: v for k, v in (self._built.model_config or {}).items() if k not in ours}
        text = self._built.text
        return {
            "seed": self._config.seed,
            "train.optimizer.name": self._config.train.optimizer.name,
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


def model_pieces(handle: ShardedModel) -> dict[str, Piece]:
    """Every parameter and persistent buffer as this rank holds it, by its name in a checkpoint: ``model.<name>``."""
    pieces = {f"{MODEL}{p.name}": Piece(p.local, p.layout) for p in handle.parameters()}
    for name, buffer in _persistent_buffers(handle.model):
        pieces[f"{MODEL}{name}"] = Piece(buffer, Layout.replicated(handle.mesh, tuple(buffer.shape)))
    return pieces


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state of a run's checkpoint. Raises CheckpointError if it was not written by a run."""
    from hyper_parallel.checkpoint.reader import Checkpoint

    state = Checkpoint(path).state
    if not {"run", "optimizer", "identity"} <= state.keys():
        raise CheckpointError(f"{path} was not written by a training run; choose another 'out'")
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

    return dist.group.WORLD if handle.mesh.world > 1 else None
