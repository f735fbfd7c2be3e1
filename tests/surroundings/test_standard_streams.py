"""Standard output that is lost: the run goes on, and one line says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hyper_parallel.launch import logs
from hyper_parallel.standard_streams import lasting

CLOSED = """
import os, sys
from hyper_parallel import standard_streams
standard_streams.begin()
with standard_streams.lasting_stdout("the rest is kept"):
    for number in range(3):
        print("line", number, flush=True)
print("descriptor", os.open(os.devnull, os.O_RDONLY), file=sys.stderr)
"""


def test_a_stream_whose_reader_leaves_becomes_the_null_device() -> None:
    reader, writer = os.pipe()
    reasons: list[OSError] = []
    stream = lasting(writer, reasons.append)
    print("one", file=stream)
    os.close(reader)
    print("two", file=stream)
    print("three", file=stream)
    assert os.write(stream.fileno(), b"of native code") == 14
    stream.close()
    assert [type(reason) for reason in reasons] == [BrokenPipeError]


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen(["wc", "-c"], stdin=reader, stdout=subprocess.PIPE) as count:
        os.close(reader)
        stream = lasting(writer, lambda error: None)
        stream.write("x" * 1_000_000 + "\n")
        stream.close()
        assert count.stdout is not None and int(count.stdout.read()) == 1_000_001


def test_a_process_without_standard_output_keeps_its_descriptors_and_says_so_once() -> None:
    for redirection, why in ((">&-", "is closed"), ("> /dev/full", "No space left on device")):
        command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", CLOSED]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        line, descriptor = ended.stderr.splitlines()
        assert line.startswith("hyper-parallel: standard output ") and why in line
        assert line.endswith("the run goes on, and the rest is kept")
        assert int(descriptor.split()[1]) > 2


def test_a_workers_lost_terminal_is_in_its_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    errors, error_writer = os.pipe()
    os.close(reader)
    with logs.recording(tmp_path / "rank-0.log", (writer, error_writer), "'out' has it"):
        print("step 1")
        print("step 2")
    os.close(writer)
    os.close(error_writer)
    with os.fdopen(errors) as file:
        assert file.read().count("the run goes on, and 'out' has it") == 1
    assert (tmp_path / "rank-0.log").read_text().count("can no longer be written to (Broken pipe)") == 1


def test_a_command_whose_result_is_its_output_ends_without_it() -> None:
    command = [sys.executable, "-m", "hyper_parallel", "--help"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "hyper-parallel: error: cannot write to standard output: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
