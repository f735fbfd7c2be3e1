"""`roles: auto`: what a file may say, which layouts there are, what waves tell, and the choice on known times."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.rl_runs import rl_config
from hyper_parallel.config.load import build
from hyper_parallel.config.rl import RLConfig, load_rl
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl import role_split
from hyper_parallel.rl.role_layouts import (
    Candidates,
    Measured,
    RoleLayout,
    RoleTimes,
    Wave,
    candidates_of,
    device_count,
    pass_law,
    roles_of,
    simulation_of,
)
from hyper_parallel.rl.role_measurement import _middle
from hyper_parallel.rl.role_split import choose
from hyper_parallel.rl.simulator import simulate_alternating, simulate_colocated, simulate_loop


def auto(**roles: Any) -> RLConfig:
    return rl_config("out", roles={"split": "auto", **roles})


def test_in_short_and_over_written_devices() -> None:
    """`roles=auto` takes devices away and leaves the rest."""
    short = rl_config("out", roles="auto")
    assert short.roles.open
    written = rl_config("out").model_dump(mode="json")
    written["roles"] = {"actor": {"devices": 0}, "rollout": {"devices": 1, "batch": 7}, "restarts": 3}
    over = build(RLConfig, [("run.yaml", written)], ["roles=auto", "roles.devices=2"])
    assert over.roles.open
    assert (over.roles.rollout.batch, over.roles.restarts, over.roles.devices) == (7, 3, 2)
    assert over.roles.actor.devices is over.roles.rollout.devices is None


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"split": "auto", "actor": {"devices": 0}}, "'actor.devices' is written"),
        ({"split": "auto", "rollout": {"devices": "0-1"}}, "'rollout.devices' is written"),
        ({"split": "auto", "reference": {}}, "leave 'reference' out"),
        ({"split": "auto", "reward": {"model": "folder"}}, "does not place a reward model"),
        ({"split": "even"}, "'auto'"),
        ({"split": "auto", "devices": 0}, "at least 1"),
        ({"devices": 2}, "'split: auto' may use"),
        ({"actor": {"strategy": {"axes": {"shard": "auto"}}}}, "only 'split: auto' fills in"),
        (
            {"split": "auto", "actor": {"strategy": {"axes": {"tensor": "auto"}}}},
            "one of shard and replicate",
        ),
        ({"split": "auto", "actor": {"strategy": "auto"}}, "one of shard and replicate"),
        ({"splitt": "auto"}, "'split'"),
    ],
)
def test_mistakes_are_one_line(roles: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        rl_config("out", roles=roles)
    assert "\n" not in str(caught.value)


def test_the_number_of_devices() -> None:
    assert device_count(auto(devices=3)) == 3
    config = auto()
    assert (
        device_count(config.model_copy(update={"launch": config.launch.model_copy(update={"workers": 5})}))
        == 5
    )
    assert device_count(config) >= 1
    with pytest.raises(ConfigError, match=r"set roles\.devices to their number"):
        device_count(auto(engine="ray"))


def pairs(found: Candidates) -> list[tuple[int, int]]:
    return [(one.rollout, one.train) for one in found.apart]


def test_layouts_that_the_strategies_allow() -> None:
    """An update has 16 answers."""
    found = candidates_of(auto(devices=8))
    assert found.together == RoleLayout(together=True, rollout=8, train=8)
    assert pairs(found) == [(7, 1), (6, 2), (4, 4)]
    tensor = candidates_of(
        auto(
            devices=8,
            actor={"strategy": {"axes": {"tensor": 2}}},
            rollout={"strategy": {"axes": {"tensor": 2}}},
        )
    )
    assert tensor.engine == 2
    assert pairs(tensor) == [(6, 2), (4, 4)]
    fixed = candidates_of(auto(devices=8, actor={"strategy": {"axes": {"shard": 4}}}))
    assert (fixed.together, pairs(fixed)) == (RoleLayout(together=True, rollout=4, train=4), [(4, 4)])
    alone = candidates_of(auto(devices=1))
    assert (alone.together, alone.apart) == (RoleLayout(together=True, rollout=1, train=1), ())
    with pytest.raises(ConfigError, match="has 2 devices, the actor's written axes take 4"):
        candidates_of(auto(devices=2, actor={"strategy": {"axes": {"tensor": 4}}}))


@pytest.mark.parametrize("axis", ["shard", "replicate"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_roles_of_every_layout_are_a_run(axis: str, tensor: int) -> None:
    """Written out they load, have the devices of the layout, and keep what was written."""
    config = auto(
        devices=8,
        restarts=2,
        sleep={"host": "1GiB"},
        actor={"strategy": {"axes": {axis: "auto", "tensor": tensor}}},
        rollout={"page": 16, "batch": 9},
    )
    found = candidates_of(config)
    for layout in (found.together, *found.apart):
        assert layout is not None
        made = build(
            RLConfig,
            [
                (
                    "run.yaml",
                    {
                        **config.model_dump(mode="json"),
                        "roles": roles_of(config, layout).model_dump(mode="json"),
                    },
                )
            ],
            (),
        )
        roles = made.roles
        assert not roles.open
        assert (roles.restarts, roles.rollouts.batch, roles.rollouts.page) == (2, 9, 16)
        axes = roles.actors.strategy.axes
        assert (axes.degree(axis), axes.tensor) == (layout.train // tensor, tensor)
        assert len(roles.rollouts.placed) == layout.rollout
        assert (roles.rollouts.placed == roles.actors.placed) == layout.together
        # Copies along `replicate` of a model that is trained so are that model.
        assert made.shares_model == (layout.together and axis == "replicate" and tensor == 1)


def waves(p: float, s: float, sizes: list[int], engines: int, seed: int = 0) -> tuple[Wave, ...]:
    source = random.Random(seed)
    found = []
    for size in sizes:
        drawn = [[source.randint(1, 30) for _ in range(size)] for _ in range(engines)]
        loads = tuple((max(one), sum(one)) for one in drawn)
        found.append(Wave(loads=loads, seconds=max(p * m + s * t for m, t in loads)))
    return tuple(found)


@given(
    p=st.floats(1e-4, 1.0),
    s=st.floats(1e-4, 1.0),
    engines=st.integers(1, 4),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_waves_tell_what_a_pass_and_a_sequence_take(p: float, s: float, engines: int, seed: int) -> None:
    found = pass_law(waves(p, s, [4, 8, 16, 4, 8, 16], engines, seed))
    assert found == pytest.approx((p, s), rel=1e-6)


def test_a_disturbed_wave_counts_little() -> None:
    found = list(waves(0.02, 0.001, [4, 8, 16] * 4, 2))
    for at in (1, 5):
        found[at] = Wave(loads=found[at].loads, seconds=found[at].seconds * 3)
    assert pass_law(found) == pytest.approx((0.02, 0.001), rel=1e-2)


def test_waves_of_one_size_are_still_as_long() -> None:
    p, s = pass_law([Wave(loads=((10, 40),), seconds=2.0)] * 3)
    assert p * 10 + s * 40 == pytest.approx(2.0)


def known(
    found: Candidates, p: float, s: float, fixed: float, work: float, transfer: float, refused: float = 0.0
) -> Measured:
    """As if measured on workers whose times these are."""
    times = {}
    for layout in (found.together, _middle(found)):
        if layout is not None:
            times[layout.together] = RoleTimes(
                layout=layout,
                waves=waves(p, s, [1, 2, 4, 1, 2, 4], max(1, layout.rollout // found.engine)),
                train=(fixed + work / layout.train,) * 3,
                score=(),
                transfer=(transfer,) * 3,
            )
    source = random.Random(1)
    return Measured(
        together=times.get(True),
        apart=times.get(False),
        lengths=tuple(source.randint(1, 4) for _ in range(50)),
        reward=0.001,
        refused=refused,
    )


@given(
    devices=st.integers(2, 9),
    tensor=st.sampled_from([1, 2]),
    staleness=st.integers(0, 3),
    order=st.sampled_from(["fifo", "window", "discard"]),
    p=st.floats(0.001, 0.1),
    s=st.floats(0.001, 0.1),
    fixed=st.floats(0.001, 0.5),
    work=st.floats(0.0, 4.0),
    transfer=st.sampled_from([0.0, 0.2]),
)
@settings(max_examples=40, deadline=None)
def test_no_other_layout_is_simulated_faster(
    devices: int,
    tensor: int,
    staleness: int,
    order: str,
    p: float,
    s: float,
    fixed: float,
    work: float,
    transfer: float,
) -> None:
    config = rl_config(
        "out",
        roles={"split": "auto", "devices": devices, "rollout": {"strategy": {"axes": {"tensor": tensor}}}},
        rl={"staleness": staleness, "order": order},
    )
    found = candidates_of(config)
    measured = known(found, p, s, fixed, work, transfer)
    choice = choose(config, found, measured)
    seconds = choice.predictions[0].seconds
    assert choice.layout == choice.predictions[0].layout
    everything = []
    if found.together is not None:
        setup = simulation_of(config, measured, engine=found.engine, together=True)
        everything.append(simulate_alternating(setup).seconds)
    for layout in found.apart:
        setup = simulation_of(config, measured, engine=found.engine, together=False)
        if len(setup.train.measured) == 1 and layout.train not in setup.train.measured:
            continue
        sized = setup.model_copy(update={"devices": layout.rollout + layout.train})
        everything.append(simulate_loop(sized, layout.rollout).seconds)
    assert seconds == min(everything)
    if len(choice.predictions) > 1:
        assert choice.predictions[1].seconds == sorted(everything)[1]


def test_synchronous_roles_take_turns_and_asynchronous_ones_do_not() -> None:
    """Two devices whose roles take as long as each other."""
    found: dict[int, bool] = {}
    for staleness in (0, 2):
        config = rl_config("out", roles={"split": "auto", "devices": 2}, rl={"staleness": staleness})
        candidates = candidates_of(config)
        # Passes do not get shorter on more devices, updates do by little.
        measured = known(candidates, p=0.1, s=0.0, fixed=0.3, work=0.1, transfer=0.0)
        found[staleness] = choose(config, candidates, measured).layout.together
    assert found == {0: True, 2: False}


def test_taking_turns_without_staleness_is_the_colocated_loop() -> None:
    config = rl_config("out", roles={"split": "auto", "devices": 2})
    candidates = candidates_of(config)
    measured = known(candidates, 0.01, 0.002, 0.1, 0.2, 0.05)
    setup = simulation_of(config, measured, engine=1, together=True)
    assert simulate_alternating(setup) == simulate_colocated(setup)
    stale = setup.model_copy(update={"staleness": 2})
    assert simulate_alternating(stale).seconds <= simulate_colocated(setup).seconds
    # Nothing runs beside an update: the shares of both add up to one device's time at most.
    result = simulate_alternating(stale)
    assert result.generating + result.training <= 1 + 1e-9


def test_the_choice_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, answer, task):\n    return 1.0\n")
    config = rl_config(
        tmp_path / "run", roles={"split": "auto", "devices": 2}, task={"reward": "mine.py:score"}
    )
    assert role_split.read_split(config) is None
    candidates = candidates_of(config)
    measured = known(candidates, 0.01, 0.002, 0.1, 0.2, 0.05)
    choice = choose(config, candidates, measured)
    role_split.write_split(config, choice, candidates, measured, tmp_path)
    assert role_split.read_split(config) == choice
    # The run file has roles with devices, and finds the reward wherever it lies.
    made = load_rl(tmp_path / "run" / "run.yaml")
    assert made.roles == roles_of(config, choice.layout)
    assert made.task.reward == f"{tmp_path}/mine.py:score"
    others = {"roles", "task"}
    assert made.model_dump(exclude=others) == config.model_dump(exclude=others)
    # Another number of devices, or strategies that do not fit, are refused in one line.
    for roles, message in (
        ({"devices": 3}, "splits 2 devices, and this run has 3"),
        ({"devices": 2, "actor": {"strategy": {"axes": {"tensor": 4}}}}, "does not go with the strategies"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            role_split.read_split(rl_config(tmp_path / "run", roles={"split": "auto", **roles}))
        assert "\n" not in str(caught.value)
    (tmp_path / "run" / "split.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        role_split.read_split(config)
