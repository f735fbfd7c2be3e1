"""Plans of generation: what hides is placed, what cannot be fast is refused by its physics, and the file is
simulated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.cli.main import main
from hyper_parallel.cluster import Cluster
from hyper_parallel.config.generate import check_folder, load_generate, load_generation
from hyper_parallel.config.inference import GenerationWorkload, Inference
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.generate.answer import file_text
from hyper_parallel.planner.generate.search import GenerationQuestion, most_requests, solve
from hyper_parallel.simulator.generation.choose_split import TOLERANCE
from hyper_parallel.strategy.memory import GenerationMemory
from hyper_parallel.workload.published import shape


def question(
    work: dict[str, Any],
    *,
    model: str = "llama-3-8b",
    cluster: str = "h100x1",
    batch: int = 32,
    rows: bool = False,
    memory: dict[str, Any] | None = None,
    slow: bool = False,
) -> GenerationQuestion:
    """What to plan."""
    machine = Cluster.named(cluster)
    return GenerationQuestion(
        shape=shape(model),
        cluster=machine,
        devices=machine.ranks or 1,
        work=GenerationWorkload(**work),
        settings=Inference(batch=batch, page=512, rows=8192),
        rows_given=rows,
        memory=GenerationMemory(**(memory or {})),
        slow=slow,
    )


DECODE = {"requests": 32, "prompt_tokens": 4096, "answer_tokens": 256}
TIGHT = {"device": "24GiB", "host": "200GiB"}


def test_dense_decode_is_refused_by_its_physics() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be fast: dense decode .* at most 1\.6% of them hide .* --slow-ok"
    ):
        solve(question(DECODE, memory=TIGHT))
    slow = solve(question(DECODE, memory=TIGHT, slow=True)).best
    assert slow.choice.fits
    assert slow.choice.slower > 1
    assert slow.choice.footprint.device <= 24 * 2**30
    with pytest.raises(ConfigError, match=r"nothing fits: .* host needs"):
        solve(question(DECODE, memory={"device": "2GiB", "host": "1GiB"}, slow=True))


def test_prompts_hide_weights_and_contexts() -> None:
    work = {"requests": 4, "prompt_tokens": 131072, "answer_tokens": 1}
    best = solve(question(work, batch=4, memory={"device": "16GiB", "host": "200GiB"})).best
    assert best.choice.fast
    assert best.choice.footprint.device <= 16 * 2**30
    assert best.choice.footprint.device < 0.74 * best.choice.whole_footprint.device
    assert best.choice.slower <= TOLERANCE
    assert best.choice.split.contexts or best.choice.split.layers


def test_what_fits_stays_on_the_device() -> None:
    best = solve(question({"requests": 4, "prompt_tokens": 512}, batch=4)).best
    assert best.choice.slower == 0
    assert not best.choice.split.any
    assert set(best.choice.footprint.by_tier) == {"device"}


def test_idle_conversations_make_room_for_more() -> None:
    # Four conversations for each that runs.
    work = {"requests": 32, "prompt_tokens": 8192, "answer_tokens": 128, "turns": 4, "idle_seconds": 60.0}
    apart = {"device": "70GiB", "host": "1000GiB"}
    together = most_requests(question(work, batch=8, rows=True, memory={"device": "70GiB", "host": "1MiB"}))
    tiers = most_requests(question(work, batch=8, rows=True, memory=apart))
    assert tiers.best.choice.split.idle
    assert tiers.best.choice.fast
    assert tiers.best.work.requests > 1.73 * together.best.work.requests


def test_axes_are_searched() -> None:
    answer = solve(question(DECODE, model="llama-3-70b", cluster="h100x8", rows=True))
    assert {plan.tensor * plan.replicate for plan in answer.plans} == {8}
    assert len({plan.tensor for plan in answer.plans}) > 1
    assert answer.best.tokens_per_second == max(
        plan.tokens_per_second for plan in answer.plans if plan.choice.fast
    )
    for plan in answer.plans:
        assert plan.choice.run.bound <= plan.choice.run.seconds


def test_the_file_is_what_simulate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = solve(
        question({"requests": 8, "prompt_tokens": 65536, "answer_tokens": 1}, batch=8, memory=TIGHT)
    ).best
    path = tmp_path / "plan.yaml"
    path.write_text(file_text(best, "llama-3-8b"))
    run = load_generation(str(path))
    assert run.inference.rows == best.settings.rows
    assert run.workload == best.work
    assert run.strategy.memory.device == 24 * 2**30
    settings = load_generate(file=path)
    assert settings.strategy == run.strategy
    assert settings.inference.model_dump() == run.inference.model_dump()
    main_of(["simulate", str(path), "--generate", "--cluster", "h100x1", "--json", "workload.requests=2"])
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is True
    assert found["fits"] and found["fast"]
    assert found["run"]["bound"] <= found["run"]["seconds"]
    assert found["prompt_pass"]["bound"] <= found["prompt_pass"]["seconds"]
    assert found["device_bytes"] < 0.74 * found["device_bytes_without_tiers"]


def test_a_file_for_another_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"version: 1\nmodel: {{path: {tmp_path / 'one'}}}\n")
    settings = load_generate(file=path)
    check_folder(settings, tmp_path / "other" / ".." / "one")
    with pytest.raises(ConfigError, match=r"model\.path: the settings are for .*one, and MODEL is .*other"):
        check_folder(settings, tmp_path / "other")


def main_of(arguments: list[str]) -> None:
    """The command, which does not leave with an error."""
    main(arguments)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--generate", "--model", "llama-3-8b", "--cluster", "h100x1", "--batch", "8"]
    main_of([*arguments, "workload.prompt_tokens=2048", "--details", "--out", str(tmp_path / "plan.yaml")])
    told = capsys.readouterr().out
    assert told.startswith("estimated: llama-3-8b on ")
    assert re.search(r"at most 1\.6% hide", told)
    assert (tmp_path / "plan.yaml").exists()
    main_of(
        [
            "simulate",
            "llama-3-8b",
            "--generate",
            "--cluster",
            "h100x1",
            "workload.requests=2",
            "inference.batch=2",
        ]
    )
    assert capsys.readouterr().out.startswith("simulated generation on 1 rank of h100x1")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["plan", "--model", "llama-3-8b", "--cluster", "h100x1", "--batch", "8", "--most"],
            "belong to --generate",
        ),
        (
            ["plan", "--generate", "--model", "llama-3-8b", "--cluster", "h100x1", "--fit"],
            "--fit is of training",
        ),
        (
            ["plan", "--generate", "--model", "llama-3-8b", "--cluster", "h100x1", "workload.promt=3"],
            "prompt_tokens",
        ),
        (["simulate", "llama-3-8b", "--generate", "--cluster", "h100x1", "--explain"], "are of training"),
        (
            ["simulate", "llama-3-8b", "--generate", "--cluster", "h100x1", "strategy.axes.tensor=2"],
            "has 1 devices",
        ),
        (["simulate", "llama-9", "--generate", "--cluster", "h100x1"], "there is no model"),
        (
            ["simulate", "llama-3-8b", "--generate", "--cluster", "h100x1", "workload.shared_tokens=9999"],
            "a part of 'prompt_tokens'",
        ),
        (
            [
                "simulate",
                "llama-3-8b",
                "--generate",
                "--cluster",
                "h100x1",
                "strategy.precision.compute=bfloat16",
            ],
            "strategy.precision",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
