"""What can be declared, in which order it is read, and what is said about text that cannot be read."""

from __future__ import annotations

import builtins
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import read_documents
from hyper_parallel.data.document import Answer, Chat, Document, Text, from_record, is_held_out
from hyper_parallel.data.sources import Source, digests, find
from hyper_parallel.errors import DataError


def documents(declared: Any, kind: str = "auto", key: str = "train") -> list[Document]:
    names = [str(item) for item in declared] if isinstance(declared, list) else str(declared)
    return list(read_documents.documents(find(names, kind, key), key))


def texts(declared: Any, kind: str = "auto") -> list[str]:
    return [document.content() for document in documents(declared, kind)]


def refusal(declared: Any, kind: str = "auto", key: str = "train") -> str:
    with pytest.raises(DataError) as caught:
        documents(declared, kind, key)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(path: Path, *records: Any) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def test_a_folder_and_a_glob_are_read_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.md", "c/empty.txt", ".hidden/x.txt", "a/.y"):
        write(tmp_path / name, "" if "empty" in name else name)
    assert texts(tmp_path) == ["b.txt", "a/b.md", "a/z.txt"]
    assert texts(tmp_path / "**" / "*.txt") == ["a/z.txt", "b.txt"]
    assert texts([tmp_path / "b.txt", tmp_path / "a"]) == ["b.txt", "a/b.md", "a/z.txt"]


def test_text_is_kept_as_it_is_but_for_the_byte_order_mark(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbf one\r\ntwo \n\n")) == [" one\r\ntwo \n\n"]


def test_json_lines_of_all_three_kinds(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = jsonl(
        tmp_path / "a.jsonl",
        {"text": "t", "id": 3},
        {"prompt": "p", "response": "r", "messages": None},
        {"messages": turns, "text": "ignored"},
    )
    write(path, path.read_text().replace("\n", "\n\n"))
    first, second, third = documents(path)
    assert first == Text(f"{path}, line 1", "t")
    assert second == Answer(f"{path}, line 3", "p", "r")
    assert third == Chat(f"{path}, line 5", turns)


def test_the_format_goes_by_name_and_content(tmp_path: Path) -> None:
    line = '{"text": "t"}\n'
    assert texts(write(tmp_path / "a.ndjson", line)) == ["t"]
    assert texts(write(tmp_path / "a.json", line + line)) == ["t", "t"]
    indented = '{\n"text": "t"}'
    assert texts(write(tmp_path / "b.json", indented), "text") == [indented]
    assert texts(write(tmp_path / "folder" / "b.json", indented).parent) == [indented]
    for name in ("b.json", "b.csv", "b.parquet"):
        with pytest.raises(DataError, match="records are not read; write each as a line of JSON"):
            texts(write(tmp_path / name, indented))
    assert texts(write(tmp_path / "a.txt", line)) == [line]
    assert texts(tmp_path / "a.txt", "jsonl") == ["t"]
    assert texts(tmp_path / "a.ndjson", "text") == [line]


def test_the_standard_library_without_its_tests() -> None:
    paths = [source.path for source in find("python-stdlib", "auto", "train")]
    assert len(paths) > 300
    relative = [path.relative_to(sysconfig.get_path("stdlib")) for path in paths]
    assert {"argparse.py", "dataclasses.py"} <= {str(path) for path in relative}
    assert not any({"test", "tests", "site-packages", "idle_test"} & set(path.parts) for path in relative)
    assert paths == [source.path for source in find("python-stdlib", "auto", "train")]


def test_only_the_standard_librarys_own_files_may_be_undecodable(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.py", b"# -*- coding: latin-1 -*-\n# caf\xe9\n")
    assert list(read_documents.documents([Source(path, "text", named=False, stdlib=True)], "train")) == []
    assert "0xe9 at offset 31" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", "", ["empty.txt is empty"]),
        ("blank.txt", " \n\t\n", ["blank.txt is empty"]),
        ("latin.txt", b"caf\xe9", ["latin.txt is not UTF-8", "0xe9 at offset 3"]),
        ("marked.txt", b"\xef\xbb\xbfcaf\xe9", ["0xe9 at offset 6"]),
        ("wide.txt", "hello".encode("utf-16"), ["UTF-16", "offset 0"]),
        ("empty.jsonl", "\n\n", ["empty.jsonl is empty"]),
        (
            "cut.jsonl",
            '{"text": "a"}\n{"text": "b\n',
            ["cut.jsonl, line 2: broken JSON, unterminated string starting at column 10"],
        ),
        ("open.jsonl", '{"text": "a"\r\n', ["line 1: broken JSON, expecting ',' delimiter at column 13"]),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', ["line 2 is not UTF-8", "0xe9 at offset 24"]),
        ("list.jsonl", "[1]\n", ["line 1: a list stands here", "one JSON object a line"]),
        ("key.jsonl", '{"txet": "a", "n": 1}\n', ["line 1", "'txet', 'n'", "did you mean 'text'?"]),
        ("half.jsonl", '{"prompt": "a", "respons": "b"}\n', ["without a 'response'", "'respons' was given"]),
        ("type.jsonl", '{"text": 3}\n', ["'text' is a int", "must be a string"]),
        ("pair.jsonl", '{"text": "a\\ud83d"}\n', ["half a surrogate pair at character 1"]),
        ("none.jsonl", '{"prompt": "a", "response": ""}\n', ["'response' is empty"]),
        ("chat.jsonl", '{"messages": "hi"}\n', ["line 1: 'messages' must be a list"]),
        ("turn.jsonl", '{"messages": [3]}\n', ["message 0 is a int"]),
        (
            "role.jsonl",
            '{"messages": [{"rol": "user", "content": "a"}]}\n',
            ["message 0 has no 'role' ('rol' was"],
        ),
        (
            "user.jsonl",
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            ["no message has the role 'assistant'"],
        ),
        ("body.jsonl", '{"messages": [{"role": "assistant"}]}\n', ["message 0 has no 'content'"]),
        ("deep.jsonl", "[" * 100_000 + "\n", ["line 1: JSON that cannot be read"]),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | bytes, expected: list[str]
) -> None:
    message = refusal(write(tmp_path / name, content))
    for part in expected:
        assert part in message


def test_what_is_not_there_is_named_with_what_is_near(tmp_path: Path) -> None:
    write(tmp_path / "corpus.txt", "x")
    (tmp_path / "bare").mkdir()
    assert "did you mean 'corpus.txt'?" in refusal(tmp_path / "corpsu.txt")
    assert f"({tmp_path} has no 'bear')" in refusal(tmp_path / "bear" / "a.txt")
    assert "did you mean 'bare'?" in refusal(tmp_path / "bear" / "a.txt")
    assert "no file matches" in refusal(tmp_path / "*.md")
    assert "holds no files" in refusal(tmp_path / "bare")
    assert "did you mean 'python-stdlib'?" in refusal("python-stdlb")
    assert "needs a folder" in refusal(tmp_path / "corpus.txt", "datasets")
    assert refusal(tmp_path / "nothing", key="eval").startswith("data.eval:")


def test_the_digest_follows_content_and_order_but_not_the_place(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder / "a.txt", "a")
        write(tmp_path / folder / "b.txt", "b")
    one = digests(find(str(tmp_path / "one"), "auto", "train"))
    assert one == digests(find(str(tmp_path / "two"), "auto", "train"))
    names = [str(tmp_path / "one" / name) for name in ("b.txt", "a.txt")]
    assert one != digests(find(names, "auto", "train"))
    write(tmp_path / "two" / "b.txt", "B")
    assert one != digests(find(str(tmp_path / "two"), "auto", "train"))


def saved_dataset(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    whole = datasets.DatasetDict(made) if len(made) > 1 else next(iter(made.values()))
    whole.save_to_disk(str(folder))
    return folder


def test_a_datasets_folder(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    folder = saved_dataset(tmp_path / "d", train=[{"text": "a"}, {"text": "b"}])
    assert documents(folder) == [Text(f"{folder}, row 0", "a"), Text(f"{folder}, row 1", "b")]
    assert texts(folder, "datasets") == ["a", "b"]
    both = saved_dataset(tmp_path / "e", train=[{"messages": turns}], test=[{"prompt": "p", "response": "r"}])
    assert documents(both) == [Chat(f"{both}, row 0", turns)]
    assert documents(both, key="eval") == [Answer(f"{both}, row 0", "p", "r")]


def test_rows_of_a_table_have_the_keys_that_were_written(tmp_path: Path) -> None:
    """A table has every key in every object, null where it was absent."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "ho"},
        {"role": "assistant", "content": "no", "weight": 0},
    ]
    tools = [
        {"name": "f", "parameters": {"a": {"type": "int"}}},
        {"name": "g", "parameters": {"b": {"type": "str"}}},
    ]
    rows = [
        {"messages": turns, "tools": tools, "chat_template_kwargs": None},
        {"messages": turns, "chat_template_kwargs": {"k": False}},
    ]
    found = documents(saved_dataset(tmp_path / "d", train=rows))
    assert [chat.messages for chat in found] == [turns, turns]  # type: ignore[union-attr]
    assert [chat.silent for chat in found] == [{3}, {3}]  # type: ignore[union-attr]
    assert [chat.options for chat in found] == [{"tools": tools}, {"k": False}]  # type: ignore[union-attr]


def test_a_broken_datasets_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_dataset(tmp_path / "d", train=[{"text": "a" * 100}] * 50)
    arrow = next(folder.glob("*.arrow"))
    whole = arrow.read_bytes()
    arrow.write_bytes(whole[:200])
    assert str(folder) in refusal(folder)
    arrow.unlink()
    assert "save_to_disk" in refusal(folder)
    arrow.write_bytes(whole)
    assert len(documents(folder)) == 50

    other = saved_dataset(tmp_path / "e", left=[{"text": "a"}], right=[{"text": "a"}])
    assert "has the splits left, right" in refusal(other)

    real_import = builtins.__import__

    def without_datasets(name: str, *rest: Any, **more: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    assert "pip install 'hyper-parallel[datasets]'" in refusal(folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
records = json_values | st.dictionaries(
    st.sampled_from(["text", "prompt", "response", "messages", "tools", "chat_template_kwargs"]),
    json_values
    | st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "weight"]), st.text(max_size=9) | st.integers(0, 2)
        )
    ),
)


@settings(deadline=None)
@given(records)
def test_any_record_is_a_document_or_one_line_of_error(record: Any) -> None:
    message, document = "here: ", None
    try:
        document = from_record(record, "here")
    except DataError as error:
        message = str(error)
    assert message.startswith("here: ") and "\n" not in message
    assert document is None or isinstance(document.content(), str)


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, unique=True), st.floats(0, 0.9), st.floats(0, 0.1))
def test_a_larger_holdout_keeps_what_a_smaller_one_held_out(
    items: list[str], share: float, more: float
) -> None:
    for item in items:
        if is_held_out(Text("here", item), share):
            assert is_held_out(Text("elsewhere", item), share + more)


def test_the_holdout_is_about_its_share_and_of_content_alone() -> None:
    held = [is_held_out(Text("", f"document {number}"), 0.1) for number in range(5000)]
    assert 400 < sum(held) < 600
    assert not any(is_held_out(Text("", f"document {number}"), 0.0) for number in range(100))
    assert [is_held_out(Text("x", f"document {number}"), 0.1) for number in reversed(range(5000))] == held[
        ::-1
    ]
