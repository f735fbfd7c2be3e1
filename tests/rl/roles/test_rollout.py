"""A rollout's log-probabilities are those of the version that drew each token, whatever comes in between."""

from __future__ import annotations

from typing import Any

import torch

from harness.rl_runs import rl_config
from hyper_parallel.rl.roles.models import rollout_model, tokenizer_of
from hyper_parallel.rl.roles.rollout import Rollout
from hyper_parallel.rl.sample import Prompted, Sample


def rollout_of(tmp_path: Any, **rl: Any) -> Rollout:
    config = rl_config(
        tmp_path,
        rl={"max_tokens": 12, "temperature": 0.8, **rl},
        roles={"rollout": {"devices": 1, "page": 16}},
    )
    tokenizer = tokenizer_of(config)
    torch.manual_seed(0)
    return Rollout(config, rollout_model(config, tokenizer, torch.device("cpu")), tokenizer)


def asked(first: int, count: int) -> list[Prompted]:
    return [
        Prompted(ticket=row, place=place, row=row, prompt=f"{row % 1000:03d}=")
        for row in range(first, first + count)
        for place in range(2)
    ]


def new_weights(model: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator) * 0.05)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def exact(model: Any, sample: Sample, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt, *sample.tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(sample.prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]


def test_tokens_of_several_versions(tmp_path: Any) -> None:
    rollout = rollout_of(tmp_path)
    weights = {0: {name: value.detach().clone() for name, value in rollout.model.named_parameters()}}
    found = rollout.generate(asked(0, 3), 3)
    for version in (1, 2):
        weights[version] = new_weights(rollout.model, version)
        rollout.renewed(version)
        found += rollout.generate(asked(3 * version, 2), 3)
    while rollout.busy:
        found += rollout.generate([], 100)
    assert len(found) == 14
    assert any(len(set(one.versions)) > 1 for one in found)
    for one in found:
        assert list(one.versions) == sorted(one.versions)
        got = torch.tensor(one.logprobs)
        for version in set(one.versions):
            rollout.model.load_state_dict(weights[version], strict=False)
            own = torch.tensor([this == version for this in one.versions])
            torch.testing.assert_close(got[own], exact(rollout.model, one, 0.8)[own], atol=1e-4, rtol=0)


def test_answers_do_not_depend_on_lists(tmp_path: Any) -> None:
    """One prompt after the other, all at once, and given up in between."""
    rollout = rollout_of(tmp_path)
    together = rollout.generate(asked(0, 4), 100)
    while rollout.busy:
        together += rollout.generate([], 100)
    apart = []
    for row in range(4):
        apart += rollout.generate(asked(row, 1), 2)
    rollout.generate(asked(50, 2), 1)
    rollout.drop([50, 51])
    while rollout.busy:
        apart += rollout.generate([], 2)

    def key(one: Sample) -> tuple[int, int]:
        return one.row, one.place

    assert sorted(together, key=key) == sorted(apart, key=key)


def test_an_answer_ends_with_its_end_token(tmp_path: Any) -> None:
    rollout = rollout_of(tmp_path, temperature=3.0)
    found = rollout.generate(asked(0, 8), 100)
    while rollout.busy:
        found += rollout.generate([], 100)
    end = rollout.tokenizer.eos
    assert {one.ended for one in found} == {True, False}
    for one in found:
        assert one.ended == (one.tokens[-1] == end)
        assert end not in one.tokens[:-1]
        assert len(one.tokens) == 12 or one.ended
