"""The Hugging Face Hub: ids of models and data sets in place of folders, pinned to a commit and downloaded once.

`hub_id`: what counts as an id, and its folder in the cache; `download`: the files; `failures`: errors in one line."""

from hyper_parallel.hub.download import Wanted, current_commit, pinned
from hyper_parallel.hub.hub_id import HubId, fetched_folder, local_folder, parse, parse_explicit

__all__ = [
    "HubId",
    "Wanted",
    "current_commit",
    "fetched_folder",
    "local_folder",
    "parse",
    "parse_explicit",
    "pinned",
]
