"""Which feature works in which kind of run, found by running each: python tools/features.py [--write docs/features.md]

`--cells "RL actor" "one mesh/profile"` runs those of a kind of run, or one cell; the others are taken from the page.

A cell is a run of four steps of a tiny model on two workers of this machine, with one feature asked for. It works where
the run ends well and left what the feature is for; else the cell has the line that the run ended with, or what is
missing.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
LLAVA = {
    "model_type": "llava",
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    },
    "text_config": {**LLAMA, "model_type": "llama"},
    "vision_feature_layer": -1,
}  # fmt: skip

Settings = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """What is asked for, and how it is seen to have worked."""

    settings: Mapping[str, Any]
    """Dotted keys of the run file."""
    shown: Callable[[Path, str], bool] = lambda out, text: True
    """Whether it is to be seen, in the folder of the run or in what it printed."""
    fails: bool = False
    """Whether the run has to end with a message, exit code 2 or more."""
    again: bool = False
    """Whether the run ends after two steps and is started once more."""


def _evaluated(out: Path, text: str) -> bool:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return any(name.startswith("eval") for line in lines for name in json.loads(line))


def _adapted(out: Path, text: str) -> bool:
    return any("lora_A" in file.read_text() for file in out.rglob("rank-*.json"))


def _compiled(out: Path, text: str) -> bool:
    logs = "".join(file.read_text() for file in out.glob("logs/*"))
    return "uncompiled" not in text and bool(re.search(r"compiled \d+% of the step's operators", logs))


def _captured(out: Path, text: str) -> bool:
    logs = "".join(file.read_text() for file in out.glob("logs/*"))
    return "under eager" not in text and "runs eagerly instead" not in logs


def _within_budget(out: Path, text: str) -> bool:
    """An actor's copies are in its metrics."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return "copies, host" in text or any(json.loads(line).get("memory_copied") for line in lines)


def _profiled(out: Path, text: str) -> bool:
    return any(json.loads(file.read_text())["traceEvents"] for file in out.glob("profile/*.json"))


def _sampled(out: Path, text: str) -> bool:
    """An actor's samples are the answers of its evaluation."""
    summary = out / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {}
    return bool(found["sample"]) if "sample" in found else "no sample" not in text


FEATURES: dict[str, Feature] = {
    "eager": Feature({"train.engine": "eager"}),
    "captured": Feature({"train.engine": "graph"}, _captured),
    "compiled": Feature({"train.compile": True}, _compiled),
    # Less than any of the steps holds, so that state or activations have to go to the host.
    "memory budget": Feature({"strategy.memory": {"device": "400KiB", "host": "64MiB"}}, _within_budget),
    "profile": Feature({"train.profile": {"steps": 1}}, _profiled),
    "evaluation": Feature({"train.eval": {"every": 2, "batches": 1}}, _evaluated),
    "sample": Feature({"train.sample": {"tokens": 4}}, _sampled),
    "resume": Feature({"checkpoint.every": 2}, lambda out, text: "resum" in text, again=True),
    "LoRA": Feature({"model.adapter": {"rank": 4}, "checkpoint.every": 2}, _adapted),
    "non-finite check": Feature(
        {"train.optimizer": {"lr": 1e30}}, lambda out, text: "finite" in text or "nan" in text, fails=True
    ),
}
RL_KEYS = {
    "train.engine": "roles.actor.engine",
    "train.compile": "roles.actor.compile",
    "train.profile": "roles.actor.profile",
    "train.eval": "eval",
    "train.sample": "eval",
    "train.optimizer": "rl.optimizer",
    "strategy.memory": "roles.actor.strategy.memory",
}
"""Where a run of reinforcement learning has the key, or would have it."""
GRAPHS = ("compiled", "memory budget")
"""What an actor has in captured updates, which are no default of its."""


def ways(folder: Path) -> dict[str, Settings]:
    """Run files of the kinds of runs."""
    text = {
        "version": 1,
        "model": {"config": LLAMA},
        "data": {"train": "python-stdlib", "tokenizer": {"vocab_size": 512}, "sequence": 32},
        "train": {"steps": 4, "batch": 4, "sample": False},
        "launch": {"device": "cpu"},
        "strategy": {"axes": {"shard": 2}},
    }
    images = {
        **text,
        "model": {"config": LLAVA},
        "data": {
            "train": str(folder / "images/train.jsonl"),
            "eval": str(folder / "images/eval.jsonl"),
            "tokenizer": {"path": str(folder / "images/model")},
            "sequence": 64,
        },
        "strategy": {
            "submodels": {
                "vision": {"modules": ["model.vision_tower", "model.multi_modal_projector"], "devices": 1},
                "language": {"devices": 1},
            }
        },
    }
    rl = {
        "version": 1,
        "model": {"config": LLAMA},
        "task": {"name": "sort", "settings": {"digits": 2}, "reward": "exact_match"},
        "rl": {"algorithm": "grpo", "steps": 4, "prompts": 32, "group": 16, "max_tokens": 2},
        "eval": {"prompts": 4},
        "launch": {"device": "cpu"},
        "roles": {"actor": {"devices": 0}, "rollout": {"devices": 1, "batch": 8, "page": 16}},
    }
    return {
        "one mesh": text,
        "pipeline": {**text, "strategy": {"axes": {"pipeline": 2}}},
        "submodels": images,
        "RL actor": rl,
    }


def changed(file: Settings, settings: Mapping[str, Any]) -> Settings:
    """A run file with these dotted keys set."""
    file = copy.deepcopy(file)
    for key, value in settings.items():
        *path, last = key.split(".")
        section = file
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return file


def cell(way: str, file: Settings, name: str, folder: Path) -> str:
    """Empty where the feature works; else the reason."""
    feature = FEATURES[name]
    kind, steps = ("rl", "rl.steps") if way == "RL actor" else ("train", "train.steps")
    settings = feature.settings
    if kind == "rl":
        settings = {RL_KEYS.get(key, key): value for key, value in settings.items()}
        settings = {
            key: {"every": 2, "prompts": 4} if key == "eval" else value for key, value in settings.items()
        }
        if name in GRAPHS:
            settings["roles.actor.engine"] = "graph"
        if name == "memory budget":
            settings["rl.micro_batch"] = 64
    out = folder / f"{way} {name}".replace(" ", "-")
    path = folder / f"{out.name}.yaml"
    path.write_text(json.dumps({**changed(file, settings), "out": str(out)}))
    code, text = run([kind, str(path), *([f"{steps}=2"] if feature.again else [])], folder)
    if feature.again and not code:
        code, text = run([kind, str(path)], folder)
    print(f"{way}, {name}: {code}", file=sys.stderr, flush=True)
    if bool(code) != feature.fails:
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        return re.sub(r"^hyper-parallel: error: (\S+\.yaml: )?", "", lines[-1])
    if not feature.shown(out, text):
        missing = [
            line for line in text.splitlines() if re.match(r"no \w+:|.*(uncompiled|under eager)", line)
        ]
        return (missing or ["nothing of it is to be seen"])[0]
    return ""


def table(folder: Path, known: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """By feature and kind of run: empty where it works, else the reason; those that are `known` are not run."""
    run([str(ROOT / "examples" / "draw_images.py"), str(folder / "images")], folder)
    files = ways(folder)
    return {
        name: {
            way: known[name][way] if way in known.get(name, {}) else cell(way, file, name, folder)
            for way, file in files.items()
        }
        for name in FEATURES
    }


def written(text: str) -> dict[str, dict[str, str]]:
    """The table of a page that `page` wrote."""
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    first, _, *rows = [
        [part.strip() for part in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {
        name: {
            way: "" if shown == "yes" else reasons[shown.removeprefix("no (").rstrip(")")]
            for way, shown in zip(first[1:], cells, strict=True)
        }
        for name, *cells in rows
    }


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """The document."""
    first = next(iter(found.values()))
    reasons = list(dict.fromkeys(why for row in found.values() for why in row.values() if why))
    lines = [
        "# What works in which run",
        "",
        "Each cell is a run of a tiny model on two workers, one of them an actor's in reinforcement learning, with the "
        "feature in its file. It works where the run ends well and left what the feature is for. "
        "A number is that of the reason below: the line with which the run ended.",
        "",
        "<!-- written by python tools/features.py --write docs/features.md -->",
        "",
        "| | " + " | ".join(first) + " |",
        "|---" * (len(first) + 1) + "|",
    ]
    for name, row in found.items():
        shown = ["yes" if not why else f"no ({reasons.index(why) + 1})" for why in row.values()]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += ["", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


def run(arguments: list[str], folder: Path) -> tuple[int, str]:
    """The exit code and the output of `hyper-parallel`, or of a Python file."""
    program = [] if arguments[0].endswith(".py") else ["-m", "hyper_parallel"]
    done = subprocess.run(
        [sys.executable, *program, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    """Run every cell, print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the file to write; left out, the table is printed")
    parser.add_argument("--cells", nargs="+", help="those to run: KIND or KIND/FEATURE")
    given = parser.parse_args()
    known: dict[str, dict[str, str]] = {}
    if given.cells:
        for name, row in written((ROOT / "docs" / "features.md").read_text()).items():
            known[name] = {
                way: why for way, why in row.items() if not {way, f"{way}/{name}"} & set(given.cells)
            }
    with tempfile.TemporaryDirectory() as folder:
        text = page(table(Path(folder), known))
    if given.write is None:
        print(text)
    else:
        given.write.write_text(text)


if __name__ == "__main__":
    main()
