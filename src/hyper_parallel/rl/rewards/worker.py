"""A worker process of a pool: reads jobs, calls a handler, and writes replies as frames of JSON (`socket_frames`).

The first frame of the parent names the handler; the worker answers
`{"ready": true}` or `{"error": line}`. Then each frame is a list of messages, which are answered one by one, since the
parent's time limit holds for each.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from hyper_parallel.proc import die_with
from hyper_parallel.socket_frames import framed, read_frame

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""From a job's message to its reply. Whatever it raises costs that job only."""


def main(descriptor: int, parent: int) -> None:
    """The worker's loop, until the parent closes the connection or ends."""
    die_with(parent)
    os.set_inheritable(descriptor, False)  # a child of the user's function must not hold the connection open
    channel = socket.socket(fileno=descriptor)
    # The user's function may print: not into what the parent may use standard output for.
    os.dup2(2, 1)
    try:
        start = _read(channel)
        handler: Handler = _handler(start)
    except BaseException as error:
        _write(channel, {"error": line_of(error), "kind": type(error).__name__})
        return
    _write(channel, {"ready": True})
    while True:
        for message in _read(channel):
            began = time.monotonic()
            try:
                reply = json.dumps(handler(message))
            except BaseException as error:
                reply = json.dumps({"raised": line_of(error) + _place_of(error)})
            _send(channel, f'{{"seconds": {time.monotonic() - began:.6f}, "reply": {reply}}}')


def rewards(name: str, folder: str, options: dict[str, Any]) -> Handler:
    """The handler that calls a reward function; the reply holds `value`, or the reason under `failed`."""
    from hyper_parallel.rl.rewards.reward import load_reward

    function = load_reward(name, folder, options)
    if name == "code":
        from hyper_parallel.rl.rewards.sandbox import quiet

        quiet()  # the pool has warned
    if name == "math":
        from hyper_parallel.rl.rewards.answer_match import prepare

        prepare()  # seconds, which the first answer's limit would have to hold

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        return number_of(function(message["prompt"], message["answer"], message["task"]))

    return handle


def number_of(value: Any) -> dict[str, Any]:
    """`{"value": number}` for a finite real number, a NumPy or a torch scalar; else `{"failed": why}`."""
    from math import isfinite
    from numbers import Real

    item = getattr(value, "item", None)
    if not isinstance(value, Real) and callable(item):
        value = item()
    if not isinstance(value, Real):
        return {"failed": f"it returned {type(value).__name__}, and a number is needed"}
    number = float(value)
    return (
        {"value": number}
        if isfinite(number)
        else {"failed": f"it returned {number}, and a finite number is needed"}
    )


def line_of(error: BaseException) -> str:
    """An exception in one bounded line; of an error of HyperParallel, its message only."""
    from hyper_parallel.errors import HyperParallelError

    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    known = isinstance(error, HyperParallelError)
    return " ".join((text if known else f"{type(error).__name__}: {text}").split())[:500]


def _place_of(error: BaseException) -> str:
    """` (FILE, line N, in FUNCTION)`: the last frame of a traceback; empty for an error of HyperParallel."""
    from traceback import extract_tb

    from hyper_parallel.errors import HyperParallelError

    frames = extract_tb(error.__traceback__)
    if isinstance(error, HyperParallelError) or not frames:
        return ""
    last = frames[-1]
    return f" ({os.path.basename(last.filename)}, line {last.lineno}, in {last.name})"


def _handler(start: dict[str, Any]) -> Handler:
    import importlib

    module, _, name = start["factory"].partition(":")
    sys.path.insert(0, start["folder"])
    factory: Callable[[str, str, dict[str, Any]], Handler] = getattr(importlib.import_module(module), name)
    return factory(start["name"], start["folder"], start["options"])


def _read(channel: socket.socket) -> Any:
    body = read_frame(channel)
    if body is None:
        os._exit(0)  # the pool was closed
    return json.loads(body)


def _write(channel: socket.socket, reply: dict[str, Any]) -> None:
    _send(channel, json.dumps(reply))


def _send(channel: socket.socket, frame: str) -> None:
    try:
        channel.sendall(framed(frame.encode()))
    except OSError:
        os._exit(0)
