"""Are the losses of reinforcement learning those of TRL? python benchmarks/verify_rl_losses.py [--fixture]

On random batches with ragged masks the code of TRL's trainers and `hyper_parallel.rl.losses` compute the same losses,
gradients with respect to log-probabilities, and advantages: of TRL 1.16 GRPO in its four normalizations, RLOO, DPO, KTO
and the reward model's loss; of TRL 0.29 PPO. Right is a difference of at most 1e-6.

Runs where TRL is installed beside this library; in a folder of its own is enough (pip install --no-deps --target FOLDER
trl==1.16.0, or 0.29.0; PYTHONPATH=FOLDER) if Transformers, Accelerate and Datasets are there. With --fixture the
batches and what TRL answers are written into tests/rl/losses/trl_reference.json. Ends with 1 when a case is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import torch
from commandline import run
from measure import ROOT, quiet, write
from torch import Tensor

from harness.rl_loss_cases import FUNCTIONS

RIGHT = 1e-6
SEEDS = 20
FIXTURE = ROOT / "tests" / "rl" / "losses" / "trl_reference.json"
Batch = dict[str, Tensor]


def random_batch(seed: int, prompts: int, group: int, length: int) -> Batch:
    """Answers of 1 to `length` tokens; the ratios of about half of the tokens are beyond the usual clip."""
    draw = torch.Generator().manual_seed(seed)
    rows = prompts * group

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def ragged() -> Tensor:
        lengths = torch.randint(1, length + 1, (rows,), generator=draw)
        lengths[0] = length
        return (torch.arange(length) < lengths[:, None]).long()

    logprobs = -normal(rows, length).exp()
    mask = ragged()
    rewards = torch.randint(0, 3, (prompts, group), generator=draw).float() / 2 + normal(prompts, group) * 0.1
    rewards[0] = 1.0
    rewards[-1, -1] = torch.nan
    return {
        "mask": mask,
        "generated_mask": torch.cat([mask, ragged()]),
        "logprobs": logprobs,
        "behaviour": logprobs + 0.3 * normal(rows, length),
        "proximal": logprobs + 0.3 * normal(rows, length),
        "reference": logprobs + 0.4 * normal(rows, length),
        "entropy": normal(rows, length).abs(),
        "advantages": normal(rows),
        "rewards": rewards,
    }


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Name, function and settings of each case of the trainers of TRL 1.16."""
    normalizations = {"grpo": {}, "bnpo": {}, "dr_grpo": {"max_length": 11}, "dapo": {"updates": 2}}
    found: list[tuple[str, str, dict[str, Any]]] = [
        (f"GRPO {name}, KL {kl}", "policy", {"normalization": name, "kl": kl, "clip_high": 0.28, **others})
        for name, others in normalizations.items()
        for kl in (0.0, 0.04)
    ]
    found += [
        ("GRPO dual clip", "policy", {"normalization": "bnpo", "dual_clip": 1.3}),
        ("GRPO truncated weights", "policy", {"normalization": "grpo", "weight_cap": 1.1, "kl": 0.04}),
        ("GRPO entropy", "policy", {"normalization": "bnpo", "entropy": 0.01}),
        ("GSPO", "policy", {"normalization": "grpo", "ratio": "sequence_mean", "clip_low": 0.03}),
        ("RLOO", "rloo", {}),
        ("RLOO clip higher", "rloo", {"clip_low": 0.3, "clip_high": 0.4}),
        ("DPO sigmoid", "dpo", {"kind": "sigmoid", "beta": 0.1}),
        ("DPO ipo", "dpo", {"kind": "ipo", "beta": 0.4}),
        ("DPO robust", "dpo", {"kind": "robust", "beta": 0.1, "label_smoothing": 0.1}),
        ("KTO", "kto", {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5}),
        ("Reward model", "reward_model", {"centering": 0.0, "margin": False}),
        ("Reward model, margin, centred", "reward_model", {"centering": 0.01, "margin": True}),
    ]
    for scale in ("group", "batch", "none"):
        found.append((f"GRPO advantages, {scale}", "advantages", {"trainer": "GRPO", "scale": scale}))
    for normalize in (False, True):
        settings = {"trainer": "RLOO", "normalize": normalize, "kl": 0.05}
        found.append((f"RLOO advantages{', normalized' * normalize}", "advantages", settings))
    return found


Compared = tuple[str, str, dict[str, Any], Batch, dict[str, Tensor]]
"""Name, function, settings, batch, and what TRL gives."""


def of_trainers(seed: int, prompts: int, group: int, length: int) -> Iterator[Compared]:
    """Each case of TRL 1.16 on one random batch."""
    from harness import trl_losses

    for name, function, settings in cases():
        batch = random_batch(seed, prompts, group, length)
        theirs = trl_losses.FUNCTIONS[function](batch, {"group": group, **settings})
        yield name, function, settings, batch, theirs


def of_ppo(seed: int, rows: int, length: int) -> Iterator[Compared]:
    """The updates of one run of TRL's PPO trainer."""
    from harness import trl_ppo

    for name, settings in trl_ppo.SETTINGS.items():
        for update, (batch, theirs) in enumerate(trl_ppo.updates(seed, rows, length, settings)):
            yield f"PPO {name}, update {update}", "ppo", settings, batch, theirs


def differences(
    function: str, settings: dict[str, Any], batch: Batch, theirs: dict[str, Tensor]
) -> dict[str, float]:
    """The largest difference of each output; what is not trained has no gradient on either side."""
    ours = FUNCTIONS[function](batch, settings)
    assert ours.keys() == theirs.keys(), f"{function}: {ours.keys()} and {theirs.keys()}"
    return {name: float((ours[name] - value).abs().max()) for name, value in theirs.items()}


def plain(tensor: Tensor) -> Any:
    """As numbers and lists; nine digits tell any two float32 apart, and JSON has no NaN."""
    if tensor.dim():
        return [plain(row) for row in tensor]
    if not tensor.is_floating_point():
        return int(tensor)
    return None if tensor.isnan() else float(f"{float(tensor):.9g}")


def put_fixture(version: str, compared: Iterator[Compared]) -> None:
    """Batches and answers as plain data; equal batches are written once. Answers of other versions stay."""
    kept = json.loads(FIXTURE.read_text()) if FIXTURE.exists() else {}
    batches: list[Any] = []
    rows: list[Any] = []
    for name, function, settings, batch, theirs in compared:
        given, answers = ({key: plain(value) for key, value in part.items()} for part in (batch, theirs))
        if given not in batches:
            batches.append(given)
        case = {"name": name, "function": function, "settings": settings}
        rows.append({**case, "batch": batches.index(given), "trl": answers})
    kept[version] = {"batches": batches, "cases": rows}
    FIXTURE.write_text(json.dumps(kept, sort_keys=True).replace('{"batch":', '\n{"batch":') + "\n")
    print(f"wrote {FIXTURE}, {FIXTURE.stat().st_size} bytes")


def main(fixture: Annotated[bool, "write tests/rl/losses/trl_reference.json too"] = False) -> bool:
    """Compare, write, and say what is wrong; whether anything is."""
    import datasets
    import trl

    quiet()
    datasets.disable_progress_bars()
    version = trl.__version__
    is_ppo = version.startswith("0.")
    worst: dict[str, dict[str, float]] = {}
    largest: dict[str, dict[str, float]] = {}
    for seed in range(SEEDS):
        found = of_ppo(seed, 16, 12) if is_ppo else of_trainers(seed, 4, 4, 10)
        for name, function, settings, batch, theirs in found:
            _raise_to(worst.setdefault(name, {}), differences(function, settings, batch, theirs))
            sizes = {key: float(value.abs().max()) for key, value in theirs.items()}
            _raise_to(largest.setdefault(name, {}), sizes)
    if fixture:
        put_fixture(version, of_ppo(1000, 8, 6) if is_ppo else of_trainers(1000, 3, 2, 5))
    wrong = [name for name, values in worst.items() if not all(value <= RIGHT for value in values.values())]
    for name, values in worst.items():
        print(f"{name:32}", "  ".join(f"{key} {value:.1e}" for key, value in values.items()))
    print(f"TRL {version}: {len(worst)} cases, {len(wrong)} wrong")
    result = {"trl": version, "right": RIGHT, "batches": SEEDS, "worst_difference": worst}
    print(write(f"verify_rl_losses_{version}", {**result, "largest_value": largest, "wrong": wrong}))
    return bool(wrong)


def _raise_to(so_far: dict[str, float], found: dict[str, float]) -> None:
    """The larger of both for each name; a NaN stays, so that it is wrong."""
    for name, value in found.items():
        before = so_far.get(name, 0.0)
        so_far[name] = before if before != before or value <= before else value


if __name__ == "__main__":
    run(main)
