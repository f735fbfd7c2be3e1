"""The chosen split, kept in the run's folder: `split.json` with the times, and `run.yaml`, the run with its roles.

A run that goes on takes the split that was made and measures nothing. Who deletes `split.json` has it chosen anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.config import yaml12
from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.role_split.candidates import Candidates, RoleLayout, roles_of
from hyper_parallel.rl.role_split.choose import Choice, Prediction
from hyper_parallel.rl.role_split.role_times import Measured, pass_law

SPLIT, RUN = "split.json", "run.yaml"
FORMAT = 1


def write(
    config: RLConfig, choice: Choice, candidates: Candidates, measured: Measured | None, folder: Path | None
) -> None:
    """`folder`: of the run file. Raises OSError."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    settled = config.model_copy(update={"roles": roles_of(config, choice.layout)})
    write_run(settled, folder, (choice.line, f"The times are in {SPLIT}."))
    publish(
        out / SPLIT, (json.dumps(_described(config, choice, candidates, measured), indent=1) + "\n").encode()
    )


def write_run(config: RLConfig, folder: Path | None, notes: Sequence[str] = ()) -> None:
    """Keep what a run does in its folder: a run file itself, with the commits of models of the Hub. Raises OSError."""
    data = config.model_dump(mode="json")
    for key in ("reward", "environment"):
        # A file of the user's is looked for beside the run file.
        if data["task"][key] is not None and ".py:" in data["task"][key]:
            data["task"][key] = str((folder or Path()).absolute() / data["task"][key])
    text = "".join(f"# {line}\n" for line in notes)
    publish(Path(config.out) / RUN, (text + yaml12.write(data)).encode())


def read(config: RLConfig) -> Choice | None:
    """What was chosen for this run; None where nothing was. Raises ConfigError for a file that cannot be read, or that
    does not go with the roles that are written now."""
    file = Path(config.out) / SPLIT
    if not file.is_file():
        return None
    anew = f"delete {file} to have it chosen anew (checkpoints are read on any devices)"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        devices = int(data["devices"])
        choice = Choice(
            layout=RoleLayout(**data["chosen"]),
            predictions=tuple(
                Prediction(**{**one, "layout": RoleLayout(**one["layout"])}) for one in data["predicted"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({type(error).__name__}: {error}); {anew}") from error
    given = config.roles.devices or config.launch.workers
    if given is not None and given != devices:
        raise ConfigError(
            f"{file} splits {devices} devices, and this run has {given}; put the number back, or {anew}"
        )
    try:
        roles_of(config, choice.layout)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}: {anew}") from error
    return choice


def _described(
    config: RLConfig, choice: Choice, candidates: Candidates, measured: Measured | None
) -> dict[str, object]:
    rl = config.rl
    found: dict[str, object] = {
        "format": FORMAT,
        "devices": candidates.devices,
        "chosen": asdict(choice.layout),
        "staleness": rl.staleness,
        "order": rl.order,
        "source": "simulated from measured times",
        "predicted": [asdict(one) for one in choice.predictions],
    }
    if measured is not None:
        found["measured"] = asdict(measured)
        found["pass_law"] = {
            name: dict(zip(("pass_seconds", "sequence_seconds"), pass_law(times.waves), strict=True))
            for name, times in (("together", measured.together), ("apart", measured.apart))
            if times is not None
        }
    return found
