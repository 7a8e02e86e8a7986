"""Files that are no files: every reader of a user's file refuses pipes, devices and folders in words, at once."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.files import parse_toml, parse_yaml, read_bytes, read_json, read_text, write_whole
from flopcalc.core.estimate.traced import load_trace, make_key
from flopcalc.core.images.pictures import read_picture_size
from flopcalc.core.model.config import load_config
from flopcalc.core.spec.spec import load_spec
from flopcalc.hardware.tables import load_table
from flopcalc.measure.jobs.journal import Journal
from flopcalc.measure.sweep.matrix import load_matrix
from flopcalc.measure.sweep.run import load_results
from flopcalc.monitor.log import load_log
from flopcalc.monitor.settings import load_settings


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """A reader that waits for a pipe's writer fails its test instead of stopping them all."""

    def fail(*_: Any) -> None:
        raise AssertionError("waited for a file that is none")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_pipe(path: Path) -> str:
    os.mkfifo(path)
    return "it is a pipe, not a regular file"


def make_device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "it is a device, not a regular file"


def make_socket(path: Path) -> str:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name has about 100 characters at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)
    return "it is a socket, not a regular file"


def make_folder(path: Path) -> str:
    path.mkdir()
    return "Is a directory"


KINDS = [make_pipe, make_device, make_socket, make_folder]
READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "spec": ("a.toml", load_spec),
    "table": ("gemm.json", load_table),
    "image": ("a.png", read_picture_size),
    "results": ("results.jsonl", lambda path: load_results(os.path.dirname(path))),
    "matrix": ("m.json", load_matrix),
    "journal": ("journal.jsonl", lambda path: Journal(os.path.dirname(path), {})),
    "monitor log": ("flopcalc.jsonl", lambda path: load_log(os.path.dirname(path))),
    "monitor config": ("m.yaml", load_settings),
}


CASES = [(reader, kind) for reader in READERS for kind in KINDS]


@pytest.mark.parametrize(("reader", "kind"), CASES)
def test_no_file(reader: str, kind: Callable[[Path], str], tmp_path: Path) -> None:
    name, read = READERS[reader]
    words = kind(tmp_path / name)
    with pytest.raises(FlopcalcError) as caught:
        read(str(tmp_path / name))
    assert f"{name}: cannot be read: {words}" in str(caught.value)


@pytest.mark.parametrize("kind", [make_pipe, make_device])
def test_data_folders(kind: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in a data folder or a cache and is no file is passed over."""
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    monkeypatch.setenv("FLOPCALC_CACHE", str(tmp_path))
    for folder, name in (("presets", "odd.toml"), ("traces", f"{make_key({})}.json")):
        (tmp_path / folder).mkdir()
        kind(tmp_path / folder / name)
    assert load_config("Qwen/Qwen2-VL-7B-Instruct").config["model_type"] == "qwen2_vl"
    assert load_trace(make_key({})) is None
    with pytest.raises(FlopcalcError, match="no preset, file or folder 'odd'"):
        load_config("odd")


def test_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\x97"}')
    assert read_json(path, 20, FlopcalcError) == {"a": "×"}
    assert read_text(str(path), 14, FlopcalcError) == '{"a": "×"}'
    with pytest.raises(FlopcalcError, match="a: larger than 13 bytes, the most that is read"):
        read_bytes(path, 13, FlopcalcError)
    path.write_bytes(b"ab\xff")
    with pytest.raises(FlopcalcError, match="a: not UTF-8 text: invalid start byte at byte 2"):
        read_text(path, 20, FlopcalcError)
    with pytest.raises(FlopcalcError, match="cannot be read: embedded null byte"):
        read_bytes("a\0b", 20, FlopcalcError)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [0.0, {"__float__": "Infinity"}]}', "{'a': [0.0, inf]}"),
        ('[{"__float__": "-Infinity"}, {"__float__": "NaN"}]', "[-inf, nan]"),
        ('{"__float__": "1.5"}', "{'__float__': '1.5'}"),  # transformers writes none of these
        ('{"__float__": "NaN", "a": 1}', "{'__float__': 'NaN', 'a': 1}"),
        ('{"__float__": ["NaN"]}', "{'__float__': ['NaN']}"),
        ("[Infinity]", "[inf]"),
    ],
)
def test_infinities_as_transformers_writes_them(text: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert repr(read_json(path, 100, FlopcalcError)) == value


def test_a_jpeg_without_a_frame_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    for content in (bytes(100_000), b"\xff" * 100_000, b"\xff\xe0\x00\x02" * 20_000):
        path.write_bytes(b"\xff\xd8" + content + b"\xff\xc0\x00\x07\x08\x00\x05\x00\x07")
        with pytest.raises(FlopcalcError, match="is no PNG, JPEG"):
            read_picture_size(path)


def test_parts_are_removed(tmp_path: Path) -> None:
    old, new, foreign = (tmp_path / name for name in ("a.json.123.part", "a.json.124.part", "mine.part"))
    for path in (old, new, foreign):
        path.write_text("x")
    for path in (old, foreign):
        os.utime(path, (time.time() - 4000,) * 2)
    write_whole(str(tmp_path / "b.json"), "text")
    assert sorted(os.listdir(tmp_path)) == ["a.json.124.part", "b.json", "mine.part"]
    (tmp_path / "c").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(str(tmp_path / "c"), "text")
    assert sorted(os.listdir(tmp_path)) == ["a.json.124.part", "b.json", "c", "mine.part"]


def test_written_pipes_and_links_stay(tmp_path: Path) -> None:
    """To rename over a pipe or a device (-o /dev/stdout, --timeline /dev/full) would remove it."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads it
        write_whole(str(pipe), "text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(str(pipe), "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    link.symlink_to(file)
    write_whole(str(link), "text")
    assert (pipe.is_fifo(), link.is_symlink(), file.read_text()) == (True, True, "text")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 0o17", 15),
        ("a: 017", 17),
        ("a: 0x1F", 31),
        ("a: -3", -3),
        ("a: 1e-5", 1e-5),
        ("a: .5", 0.5),
        ("a: 12:30:45.5", "12:30:45.5"),
        ("a: 190:20:30", "190:20:30"),
        ("a: 2001-12-14", "2001-12-14"),
        ("a: 1_000", "1_000"),
        ("a: 0b11", "0b11"),
        ("a: -.inf", -math.inf),
        ("a: ~", None),
        ("a:", None),
        ("a: true", True),
        ("a: yes", True),
        ("a: OFF", False),
        ("a: y", "y"),
        ("a: '017'", "017"),
        ("a: =", "="),
        ("x: &x {b: 1}\na: {<<: *x, c: 2}", {"b": 1, "c": 2}),
        ("a: [1, {b: 2}]", [1, {"b": 2}]),
    ],
)
def test_yaml_scalars_are_those_of_1_2(text: str, value: object) -> None:
    found = parse_yaml(text)["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!bool maybe", "not valid YAML: 'maybe'"),
        ("a: !!timestamp 2020-13-45", "not valid YAML: could not determine a constructor for the tag"),
        ("a: !!int x", "invalid literal for int"),
        ("a: &a [*a]", "more than 10,000 entries"),
        ("a: *b", "not valid YAML: found undefined alias 'b' in line 1"),
        ("a: " + "[" * 5000, "not valid YAML: "),
        ("a: " + "[" * 60 + "]" * 60, "more than 50 tables or lists inside one another"),
        ("a: 0o" + "7" * 3000, "a number of more than 3,000 digits"),
        ("a: [" + "1, " * 10_000 + "]", "more than 10,000 entries"),
    ],
)
def test_yaml_that_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_yaml(text)


def test_toml_numbers_that_cannot_be_printed() -> None:
    with pytest.raises(ValueError, match="a number of more than 3,000 digits"):
        parse_toml("a = 0x" + "f" * 5000)
