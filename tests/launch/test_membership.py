"""Workers with one token find each other; whoever has another, or none, takes no place among them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from hyper_parallel.config import LaunchConfig, RunConfig, dump, from_dict
from hyper_parallel.errors import ConfigError, FollowsError, LaunchError
from hyper_parallel.launch.admission import admitted, token_of
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.launch.worker import _say_who_can_reach

TOKEN = b"one token of a run"


def meet(tokens: list[bytes | None], store: Any = None, seconds: float = 60) -> list[Any]:
    """What each rank gets, a store or an error. `store`: one for all, or a list with the connection of each."""
    store = HashStore() if store is None else store
    stores = store if isinstance(store, list) else [store] * len(tokens)

    def one(rank: int) -> Any:
        try:
            return admitted(stores[rank], rank, len(tokens), tokens[rank], timedelta(seconds=seconds))
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(tokens)) as pool:
        return list(pool.map(one, range(len(tokens))))


@pytest.mark.parametrize("real", [False, True])
def test_workers_with_the_token_share_keys_that_nobody_else_can_name(real: bool) -> None:
    store: Any = HashStore()
    stores: Any = store
    if real:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [store, *(TCPStore("127.0.0.1", store.port, wait_for_workers=False) for _ in range(2))]
    first, second, third = meet([TOKEN] * 3, stores)
    first.set("x", "1")
    assert second.get("x") == third.get("x") == b"1"
    assert not store.check(["x"])
    other, _ = meet([TOKEN] * 2)
    assert other.underlying_store is not first.underlying_store
    assert not other.check(["x"])


def test_without_tokens_the_store_is_the_one_that_was_opened() -> None:
    store = HashStore()
    assert all(found is store for found in meet([None] * 3, store))
    assert admitted(store, 0, 1, TOKEN, timedelta(seconds=1)) is store


def test_another_token_is_refused_and_named() -> None:
    zero, one, two = meet([TOKEN, b"another token altogether", TOKEN], seconds=2)
    assert zero.startswith("rank 1 does not have the launch.token of rank 0")
    assert "rank 1 and rank 0 do not have the same launch.token" in one
    assert "rank 0 did not prove that it has the token within 2 s" in two


@pytest.mark.parametrize(("zero", "one"), [(TOKEN, None), (None, TOKEN)])
def test_a_token_on_one_side_only_is_said(zero: bytes | None, one: bytes | None) -> None:
    _, said = meet([zero, one], seconds=2)
    assert "was given a launch.token and" in said and said.startswith("rank 1: ")


def test_what_another_rank_said_proves_nothing() -> None:
    class Echo:
        """A store in which somebody without the token repeats, as rank 2, what rank 1 said."""

        def __init__(self) -> None:
            self._store = HashStore()

        def set(self, key: str, value: str) -> None:
            self._store.set(key, value)
            if key.endswith("proof/1"):
                self._store.set(key.replace("proof/1", "proof/2"), value)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

    store: Any = Echo()
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(admitted, store, 0, 3, TOKEN, timedelta(seconds=60))
        pool.submit(admitted, store, 1, 3, TOKEN, timedelta(seconds=60))
        with pytest.raises(LaunchError, match=r"rank 2 does not have the launch\.token"):
            zero.result()


def _config(**launch: Any) -> RunConfig:
    return from_dict(
        {
            "version": 1,
            "out": "out",
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": "text.txt"},
            "launch": launch,
        }
    )


def test_a_token_is_handed_to_workers_and_written_nowhere() -> None:
    config = _config(token="a token of 16 or more")
    for written in (dump(config), config.model_dump_json(), repr(config), str(config.model_dump())):
        assert "a token of" not in written
    handed = RunConfig.model_validate_json(config.model_dump_json(context={"secrets": True}))
    assert token_of(handed.launch, {}) == b"a token of 16 or more"
    assert (
        token_of(LaunchConfig(), {"HYPER_PARALLEL_TOKEN": "another of 16 or more"})
        == b"another of 16 or more"
    )
    assert token_of(LaunchConfig(), {"HYPER_PARALLEL_TOKEN": ""}) is None
    with pytest.raises(LaunchError, match="has 5 characters and needs 16"):
        token_of(LaunchConfig(), {"HYPER_PARALLEL_TOKEN": "short"})
    with pytest.raises(ConfigError, match=r"launch\.token"):
        _config(token="short")


def test_a_meeting_point_that_others_can_reach_is_said(caplog: pytest.LogCaptureFixture) -> None:
    _say_who_can_reach(WorkerPlace("local", 0, 2, 0, 2, "127.0.0.1", 1), False)
    _say_who_can_reach(WorkerPlace("local", 0, 1, 0, 1, "10.0.0.1", 1), False)
    assert not caplog.records
    _say_who_can_reach(WorkerPlace("local", 0, 2, 0, 1, "10.0.0.1", 1), False)
    _say_who_can_reach(WorkerPlace("local", 0, 2, 0, 1, "10.0.0.1", 1), True)
    first, second = (record.getMessage() for record in caplog.records)
    assert "set launch.token" in first and "10.0.0.1:1" in first
    assert "set launch.token" not in second and "keep the network closed" in second


class _Gone(HashStore):
    def wait(self, *_: Any) -> None:
        raise RuntimeError("Connection reset by peer")


def test_a_rank_0_that_leaves_meanwhile_is_no_mistake_about_a_token() -> None:
    with pytest.raises(FollowsError, match="rank 0 has left"):
        admitted(_Gone(), 1, 2, None, timedelta(minutes=10))
