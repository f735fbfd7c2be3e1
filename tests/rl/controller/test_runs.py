"""Small runs of every kind end, and say what they did; a run that goes on is the run that was not interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from harness.rl_faults import left_behind
from harness.rl_runs import MODEL, expected_weights, rl_config, saved_weights
from hyper_parallel.config.train import AdamWConfig
from hyper_parallel.data.tokenizer import character_tokenizer
from hyper_parallel.errors import ConfigError, RewardError
from hyper_parallel.rl.controller.recorder import Recorder
from hyper_parallel.rl.run import run

APART = {"actor": {"devices": 0}, "rollout": {"devices": 1, "page": 16}}
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {"rl": {"algorithm": "ppo", "minibatches": 2}},
    "rloo, one step off": {
        "rl": {"algorithm": "rloo", "staleness": 1},
        "roles": APART,
        "eval": {"prompts": 16, "every": 1},
        "checkpoint": {"every": 1},
    },
    "dapo": {"rl": {"algorithm": "dapo", "minibatches": 2, "staleness": 3}, "roles": APART},
    "decoupled, discard": {
        "rl": {"objective": "decoupled", "staleness": 2, "order": "discard", "chunk": 1},
        "roles": {"actor": {"devices": 0}, "rollout": {"devices": "1-2", "page": 16}},
    },
    "truncated, window": {
        "rl": {"objective": "truncated", "staleness": 2, "order": "window", "chunk": 2},
        "roles": APART,
    },
    "reference": {"rl": {"kl": 0.1, "algorithm": "reinforce++"}, "warmup": {"steps": 2, "batch": 8}},
    "reference apart": {
        "rl": {"kl": 0.1},
        "roles": {"actor": {"devices": 0}, "rollout": {"devices": 1}, "reference": {"devices": 2}},
        "warmup": {"steps": 2, "batch": 8},
    },
    "copies": {
        "roles": {
            "actor": {"devices": "0-1", "strategy": {"axes": {"shard": 2}}},
            "rollout": {"devices": "0-1", "strategy": {"axes": {"replicate": 2}}, "page": 16},
        }
    },
}


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run(kind: str, tmp_path: Path) -> None:
    config = rl_config(tmp_path / "run", **KINDS[kind])
    summary = run(config)
    assert summary.steps == 3
    assert summary.after is not None
    steps = [one for one in records(summary.out) if "reward" in one]
    assert [one["step"] for one in steps] == [1, 2, 3]
    bound = max(config.rl.staleness, config.rl.minibatches - 1)
    assert all(one["staleness_max"] <= bound for one in steps)
    assert all(one["grad_norm"] >= 0 for one in steps)
    if config.rl.kl:
        # Before the first update the policy is the reference.
        assert steps[0]["reference_kl"] == pytest.approx(0, abs=1e-5)
        assert steps[-1]["reference_kl"] > 0
    if config.rl.algorithm == "ppo":
        assert steps[0]["value_loss"] > 0
    if config.rl.drops_equal:
        assert all(one["groups_without_variance"] == 0 for one in steps)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * config.rl.group
    assert not left_behind()


def test_answers_of_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment appends is read and not trained; rewards of turns add."""
    seen: list[Any] = []
    monkeypatch.setattr(Recorder, "batch", lambda self, report, busy: seen.extend(report.samples))
    file = Path(left_behind.__code__.co_filename).with_name("rl_environment.py")
    config = rl_config(
        tmp_path / "run",
        task={"reward": "exact_match", "environment": f"{file}:TwoTurns"},
        rl={"max_tokens": 12, "temperature": 2.0, "staleness": 1},
        roles=APART,
    )
    summary = run(config)
    assert summary.steps == 3
    assert summary.before is not None
    two = [one for one in seen if not all(one.drawn)]
    assert len(two) > len(seen) / 4
    for one in two:
        first = one.drawn.index(False)
        appended = [at for at, own in enumerate(one.drawn) if not own]
        assert appended == list(range(first, first + len(appended)))
        assert 1 <= len(appended) <= 2
        assert one.tokens[first] == 2  # 0
        assert all(one.logprobs[at] == 0 for at in appended)
        assert len(one.tokens) <= 12
        assert first + len(appended) < len(one.tokens)
    assert max(one.reward for one in two) > 1


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)
DIGITS = "0123456789=>uta"


def test_conversations_of_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns stands what the chat template writes there, after the end that the policy drew."""
    seen: list[Any] = []
    monkeypatch.setattr(Recorder, "batch", lambda self, report, busy: seen.extend(report.samples))
    words = character_tokenizer(DIGITS)
    words.chat_template = TEMPLATE
    words.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**MODEL, vocab_size=len(words), eos_token_id=0, bos_token_id=None)
    )
    model.save_pretrained(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{n}="}], "answer": f"{n}"} for n in range(100, 108)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = Path(left_behind.__code__.co_filename).with_name("rl_environment.py")
    paths = dict.fromkeys(("prompts", "held_out"), str(tmp_path / "rows.jsonl"))
    config = rl_config(
        tmp_path / "run",
        model={"path": str(tmp_path / "model"), "config": None},
        task={
            "name": None,
            "settings": {},
            **paths,
            "reward": "exact_match",
            "environment": f"{file}:TwoMessages",
        },
        rl={"max_tokens": 20, "temperature": 2.0, "staleness": 1},
        roles=APART,
    )
    summary = run(config)
    assert summary.before is not None
    two = [one for one in seen if one.turns]
    assert len(two) > len(seen) / 4
    behind = [0 if one == "." else 2 + DIGITS.index(one) for one in "t>0=.a>"]
    for one in two:
        first = one.drawn.index(False)
        assert one.tokens[first - 1] == 0
        assert list(one.tokens[first:-1][:7]) == behind[: len(one.tokens) - first - 1]
        assert one.drawn[-1]
        assert all(own == (not first <= at < first + 7) for at, own in enumerate(one.drawn[:-1]))
        assert [message["role"] for message in one.turns] == ["assistant", "tool"]
        right = set(one.task["answer"])
        shares = [len(right & set(text)) / len(right) for text in (one.turns[0]["content"], one.text)]
        assert one.reward == pytest.approx(sum(shares))


def test_going_on_is_not_being_interrupted(tmp_path: Path) -> None:
    """Bit for bit, when synchronous."""
    whole = rl_config(tmp_path / "run", rl={"steps": 4})

    def stop() -> bool:
        file = tmp_path / "run" / "metrics.jsonl"
        return file.exists() and '"reward"' in file.read_text()

    first = run(whole, stop=stop)
    assert first.stopped
    assert 0 < first.steps < 4
    second = run(whole)
    assert second.resumed_from == first.steps
    assert second.before == first.before
    assert second.checkpoint is not None
    found = saved_weights(second.checkpoint)
    for name, value in expected_weights(whole).items():
        assert torch.equal(found[name], value), name
    assert [one["step"] for one in records(second.out) if "reward" in one] == [1, 2, 3, 4]


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    run(rl_config(tmp_path / "run", rl={"steps": 1}))
    with pytest.raises(ConfigError, match="is of another run: rl differ"):
        run(rl_config(tmp_path / "run", rl={"steps": 2, "group": 8}))


def test_a_reward_that_fails_costs_its_sample(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "calls = 0\n"
        "def score(prompt, answer, task):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls % 4 == 0:\n"
        "        raise ValueError('no')\n"
        "    return float(len(answer))\n"
    )
    config = rl_config(tmp_path / "run", task={"reward": "mine.py:score"})
    summary = run(config, folder=tmp_path)
    assert summary.steps == 3
    assert summary.failed_rewards > 0
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    reasons = [one["failed"] for one in samples if one["reward"] is None]
    assert reasons
    assert set(reasons) == {"it raised ValueError: no (mine.py, line 6, in score)"}
    assert not any("failed" in one for one in samples if one["reward"] is not None)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_a_reward_that_always_fails_ends_the_run(algorithm: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, answer, task):\n    return task['gold']\n")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}="}}\n' for n in range(8)))
    config = rl_config(
        tmp_path / "run",
        task={
            "name": None,
            "settings": {},
            "prompts": str(tmp_path / "prompts.jsonl"),
            "reward": "mine.py:score",
        },
        characters="0123456789=",
        rl={"algorithm": algorithm},
    )
    with pytest.raises(RewardError, match=r"16 of 16 .* KeyError: 'gold' \(mine.py, line 2, in score\)"):
        run(config, folder=tmp_path)
    assert not left_behind()
    assert '"reward"' not in (tmp_path / "run/metrics.jsonl").read_text()
    samples = (tmp_path / "run/samples.jsonl").read_text()
    assert ("KeyError" in samples) == (algorithm == "grpo")


def test_an_optimizer_without_a_name() -> None:
    """As in `train`: the default one, with what is written."""
    config = rl_config("run", rl={"optimizer": {"lr": 3e-3}}, warmup={"optimizer": {"betas": [0.9, 0.99]}})
    assert config.rl.optimizer == AdamWConfig(lr=3e-3, weight_decay=0.0)
    assert config.warmup is not None
    assert config.warmup.optimizer == AdamWConfig(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.99))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"reward": "exact_mach"}}, "exact_match"),
        ({"task": {"name": "sorrt"}}, "'sort'"),
        ({"task": {"settings": {"digit": 3}}}, "digits"),
        ({"rl": {"staleness": 1, "minibatches": 2}}, "one step off"),
        ({"rl": {"group": 1}}, "compares answers"),
        ({"rl": {"algorithm": "dpo"}}, "hyper_parallel.rl.losses.preference has DPO's"),
        ({"rl": {"optimizer": {"lr": 1e-3, "momentum": 1}}}, "momentum: unknown key"),
        (
            {"task": {"name": None, "settings": {}, "prompts": "p.jsonl"}},
            "top level of the file, beside 'model'",
        ),
        ({"tokenizer": "folder"}, "for a 'model.config' write 'characters'"),
        ({"rl": {"algorithm": "ppo", "ratio": "answer"}}, "differ from token to token"),
        ({"roles": {"rollout": {"devices": "0-1"}, "actor": {"devices": 1}}}, "share some of their devices"),
        ({"model": {"config": {"model_type": "llama", "hidden": 3}}}, "hidden"),
    ],
)
def test_mistakes_are_one_line(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run(rl_config(tmp_path / "run", **sections))
    assert "\n" not in str(caught.value)
    assert not left_behind()
