"""Mutual challenge and response: workers prove to each other that they have the same token before they compute.

The rendezvous store accepts any connection. With `launch.token` K (or the variable
`HYPER_PARALLEL_TOKEN`), H = HMAC-SHA256 and random 256-bit numbers n₀ of rank 0 and nᵣ of each other rank:

    rank 0 → all     n₀
    rank r → rank 0  nᵣ, H(K, "worker" r world n₀ nᵣ)
    rank 0 → rank r  H(K, "accepted" r world n₀ nᵣ)

Rank 0 begins only when every rank has proved that it knows K, every rank only when rank 0 has. After that all keys of
the store begin with H(K, "keys" n₀). So a process without K, of another job or of anybody who can reach the port,
cannot join the workers or guess the names of their keys. This is not encryption: an eavesdropper sees those names, and
PyTorch's store and the connections between workers are not authenticated (SECURITY.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from hyper_parallel.config import LaunchConfig
from hyper_parallel.errors import FollowsError, LaunchError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

VARIABLE = "HYPER_PARALLEL_TOKEN"
"""The environment variable for the token, if it should not be in a file."""
LEAST = 16
"""Minimum number of characters of a token."""
_OPEN = "no token"


def token_of(launch: LaunchConfig, environ: Mapping[str, str] = os.environ) -> bytes | None:
    """This process's token, if it has one. Raises LaunchError if the token is too short."""
    token = launch.token or environ.get(VARIABLE) or None
    if token is not None and len(token) < LEAST:
        raise LaunchError(
            f"{VARIABLE} has {len(token)} characters and needs {LEAST}; make one with "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return None if token is None else token.encode()


def admitted(
    store: Store, rank: int, world: int, token: bytes | None, timeout: timedelta, attempt: str = "0"
) -> Store:
    """The store for workers with the token, after all of them have proved that they have it.

    Without a token it is `store` itself, once it is known that rank 0 has none either. `attempt` identifies one of
    several starts that share a store. Raises LaunchError on the refused rank and on rank 0, with the rank.
    """
    if world == 1:
        return store
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    place = f"hyper_parallel/admission/{attempt}"
    if rank == 0:
        challenge = _OPEN if token is None else secrets.token_hex(32)
        store.set(f"{place}/challenge", challenge)
        if token is not None:
            _examine(store, place, world, token, challenge, timeout)
    else:
        challenge = _wait(store, f"{place}/challenge", timeout, "rank 0 did not say whether it has a token")
        if (challenge == _OPEN) != (token is None):
            has, has_not = ("this one", "rank 0") if token is not None else ("rank 0", "this one")
            raise LaunchError(
                f"rank {rank}: {has} was given a launch.token and {has_not} was not; give all machines the same"
            )
        if token is not None:
            _prove(store, place, rank, world, token, challenge, timeout)
    if token is None:
        return store
    return PrefixStore(_mac(token, "keys", challenge)[:32], store)


def _examine(store: Store, place: str, world: int, token: bytes, challenge: str, timeout: timedelta) -> None:
    for rank in range(1, world):
        said = _wait(
            store, f"{place}/proof/{rank}", timeout, f"rank {rank} did not prove that it has the token"
        )
        nonce, _, proof = said.partition(" ")
        who = f"{rank} {world}"
        if not _same(proof, _mac(token, "worker", who, challenge, nonce)):
            store.set(f"{place}/verdict/{rank}", "refused")
            raise LaunchError(
                f"rank {rank} does not have the launch.token of rank 0, or is no worker of this run; give all "
                "machines the same token"
            )
        store.set(f"{place}/verdict/{rank}", _mac(token, "accepted", who, challenge, nonce))


def _prove(
    store: Store, place: str, rank: int, world: int, token: bytes, challenge: str, timeout: timedelta
) -> None:
    nonce, who = secrets.token_hex(32), f"{rank} {world}"
    store.set(f"{place}/proof/{rank}", nonce + " " + _mac(token, "worker", who, challenge, nonce))
    verdict = _wait(store, f"{place}/verdict/{rank}", timeout, "rank 0 did not prove that it has the token")
    if not _same(verdict, _mac(token, "accepted", who, challenge, nonce)):
        raise LaunchError(
            f"rank {rank} and rank 0 do not have the same launch.token; give all machines the same token"
        )


def _wait(store: Store, key: str, timeout: timedelta, otherwise: str) -> str:
    from torch.distributed import DistError

    begun = time.monotonic()
    try:
        store.wait([key], timeout)
        return bytes(store.get(key)).decode(errors="replace")
    except (DistError, RuntimeError) as error:
        if time.monotonic() - begun < timeout.total_seconds():
            raise FollowsError("rank 0 has left, and its store with it") from error
        raise LaunchError(f"{otherwise} within {timeout.total_seconds():.0f} s") from error


def _same(one: str, other: str) -> bool:
    """Constant-time comparison."""
    return hmac.compare_digest(one.encode(), other.encode())


def _mac(token: bytes, *parts: str) -> str:
    """HMAC of parts, each with its length, so that no two lists of parts are one text."""
    encoded = [part.encode() for part in parts]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in encoded)
    return hmac.new(token, text, hashlib.sha256).hexdigest()
