"""HTML pages: well-formed, self-contained, escaped, and their numbers are those of the JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flopcalc.cli import main
from flopcalc.report.html.page import DARK, LIGHT, ON_FILL, PALETTE, Html, element, escape, make_page, table
from flopcalc.report.html.pictures import Bar, draw_bars, draw_curves, find_ticks, thin
from flopcalc.report.html.treemap import Box, Leaf, arrange, divide

FILES = Path(__file__).resolve().parents[1] / "compat" / "records" / "files"
HOSTILE = '<script>alert("1")</script>&\'x'
COMMANDS = {
    "estimate": ("estimate", "sweep-tiny", "--seq", "64", "--device", "h200", "--step-time", "1ms", "--tokens", "1M"),
    "vision": ("estimate", "qwen2-vl-2b", "--text", "64", "--image", "640x480", "--depth", "4"),
    "estimate list": ("estimate", "sweep-tiny", "--seq", "64,128", "--batch", "1,2"),
    "compare": ("compare", "sweep-tiny", "gpt2", "--seq", "64"),
    "predict": ("predict", "qwen2.5-0.5b", "--seq", "128", "--device", "h200", "--memory"),
    "predict list": ("predict", "qwen2.5-0.5b", "--seq", "128,256", "--device", "h200"),
    "plan": ("plan", "qwen2.5-0.5b", "--tokens", "1B", "--device", "h200", "--gpus", "4", "--global-batch", "16"),
    "plan list": (
        "plan", "qwen2.5-0.5b", "--tokens", "1B", "--device", "h200", "--gpus", "1,2", "--global-batch", "16", "--pp",
        "1", "--tp", "1",
    ),
    "monitor": ("monitor", "show", str(FILES / "monitor")),
    "sweep": ("sweep", "summarize", "--logs-dir", str(FILES / "sweep")),
}  # fmt: skip
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, out, err


@cache
def show(case: str, style: str) -> str:
    """What a command prints; it runs once for all tests."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
        main([*COMMANDS[case], "--format", style])
    assert end.value.code == 0
    return out.getvalue()


class Reader(HTMLParser):
    """Checks that tags are balanced, and keeps what tests ask for."""

    alone = ("meta", "wbr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.alone:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def list(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def values(self) -> set[float]:
        return {float(value["value"] or "") for value in self.list("data")}


def check(page: str) -> Reader:
    """What every page must be: balanced, self-contained, and readable with a screen reader."""
    read = Reader(page)
    assert page.startswith("<!DOCTYPE html>\n")
    assert read.tags[0] == ("html", {"lang": "en"})
    names = {tag for tag, _ in read.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "a", "image", "use", "form"}
    for _, attributes in read.tags:
        assert not attributes.keys() & {"src", "href", "xlink:href", "style", "srcset", "action"}
        assert not any(name.startswith("on") for name in attributes)
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    for query in ("prefers-color-scheme:dark", "@media print", "max-width"):
        assert query in style
    assert len(read.list("h1")) == len(read.list("title")) - len(read.list("svg")) - _count_tips(page) == 1
    assert read.list("h2")
    assert all(cell["scope"] in ("col", "row") for cell in read.list("th"))
    for picture in read.list("svg"):
        assert picture["role"] == "img"
        assert picture["aria-label"]
    assert [meta for meta in read.list("meta") if meta.get("name") == "viewport"]
    return read


def _count_tips(page: str) -> int:
    """Titles inside shapes."""
    return len(re.findall(r"<(?:g|rect|circle)[^>]*><title>", page))


def collect(value: Any) -> set[float]:
    if isinstance(value, dict):
        return set().union(*map(collect, value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*map(collect, value)) if value else set()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {float(value)} if is_number else set()


@pytest.mark.parametrize("case", COMMANDS)
def test_pages(case: str) -> None:
    check(show(case, "html"))


def test_a_page_goes_into_a_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for _ in range(2):  # an old page is replaced
        written = run(capsys, *COMMANDS["estimate"], "--format", "html", "-o", str(path))
        assert written == (0, "", f"written: {path}\n")
        assert path.read_text(encoding="utf-8") == show("estimate", "html")
        assert os.listdir(tmp_path) == ["page.html"]
    assert run(capsys, *COMMANDS["estimate"], "--format", "html", "-o", "-")[1] == show("estimate", "html")


def test_numbers_of_an_estimate() -> None:
    for case in ("estimate", "vision"):
        read = check(show(case, "html"))
        result = json.loads(show(case, "json"))
        shown = {value for key in ("flops", "totals", "parameters", "run") for value in collect(result[key])} - {0.0}
        assert shown <= read.values
        for rows in (result["components"], result["modules"]):
            assert {float(row[key]) for row in rows for key in ("forward", "backward") if row[key]} <= read.values
        if result["mfu"] is not None:
            assert {result["mfu"]["value"], result["hfu"]["value"]} <= read.values
        assert f"{result['flops']['total']:,} FLOPs" in read.text


def test_numbers_of_a_comparison() -> None:
    read = check(show("compare", "html"))
    for column in json.loads(show("compare", "json")):
        assert collect(column["flops"]) - {0.0} <= read.values
        assert {float(part["forward"] + part["backward"]) for part in column["components"]} <= read.values


def test_numbers_of_a_prediction() -> None:
    read = check(show("predict", "html"))
    result = json.loads(show("predict", "json"))
    assert collect(result["breakdown"]) <= read.values
    assert {result[key] for key in ("mfu", "hfu", "tokens_per_s")} | {result["step_time_s"]["mid"]} <= read.values
    memory = result["memory_bytes"]
    shown = collect(memory["at_peak"]) | collect(memory["activations_by_recompute"])
    assert (shown | {memory["peak"], memory["largest_batch"]}) - {0.0} <= read.values
    assert {result["floors"][key] for key in ("compute_s", "bandwidth_s", "flops", "bytes")} <= read.values


def test_numbers_of_a_plan() -> None:
    read = check(show("plan", "html"))
    result = json.loads(show("plan", "json"))
    for entry in result["best"]:
        assert collect(entry["step_time_s"]) | {entry["mfu"], entry["hfu"]} <= read.values
        assert {entry["days"]["mid"], entry["gpu_hours"]["mid"], entry["memory_bytes"]["total"]} <= read.values
    assert collect(result["best"][0]["breakdown"]) <= read.values
    assert {float(loser["layouts"]) for loser in result["losers"]} <= read.values
    assert len(read.list("circle")) == 2 * len(result["front"])  # for a wide and a narrow window


def test_numbers_of_logs() -> None:
    read = check(show("monitor", "html"))
    result = json.loads(show("monitor", "json"))
    metrics = [values for values in result["metrics"].values() if values]
    assert metrics
    assert {values[key] for values in metrics for key in ("mean", "median", "last")} <= read.values
    read = check(show("sweep", "html"))
    result = json.loads(show("sweep", "json"))
    assert {result["total"], result["ok"], result["memory"]["peak_bytes"]} <= read.values


def test_hostile_names_are_text(capsys: Capture, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for command in (("estimate", str(folder), "--seq", "8"), ("compare", str(folder), "--seq", "8")):
        code, page, _ = run(capsys, *command, "--format", "html")
        assert code == 0
        check(page)
        assert "&lt;script&gt;" in page
    log = tmp_path / "flopcalc.jsonl"
    records = [
        {"type": "start", "schema": 1, "model": HOSTILE, "device": HOSTILE, "parameters": HOSTILE},
        {"type": "step", "global_step": 1, "perf/mfu": 0.5, f"dataset/{HOSTILE}/loss": 1.0, "perf/stragglers": HOSTILE},
        {"type": "event", "global_step": 1, "message": HOSTILE},
    ]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, page, _ = run(capsys, "monitor", "show", str(log), "--format", "html")
    assert code == 0
    check(page)
    assert escape(HOSTILE) in page


ERRORS: list[tuple[tuple[str, ...], str]] = [
    (("estimate", "gpt2", "--seq", "8", "-o", "x.html"), "-o writes the page of --format html"),
    (("estimate", "gpt2", "--seq", "8", "--json", "--format", "html"), "--json contradicts --format html"),
    (("estimate", "gpt2", "--seq", "8", "--by", "kind", "--format", "html"), "holds every breakdown"),
    (("estimate", "gpt2", "--seq", "8", "--format", "html", "-o", "missing/x.html"), "No such file or directory"),
    (("estimate", "gpt2", "--seq", "8", "--format", "html", "-o", "."), "is a folder"),
    (("predict", "gpt2", "--seq", "8", "--device", "h200", "--top", "3", "--format", "html"), "leave --top out"),
    (("sweep", "summarize", "--markdown", "--format", "html"), "choose one"),
]


@pytest.mark.parametrize(("command", "words"), ERRORS)
def test_errors(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *command)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_failed_write_keeps_the_old_page(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def fail(*_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    code, _, err = run(capsys, *COMMANDS["estimate"], "--format", "html", "-o", str(path))
    assert code == 2
    assert "No space left on device" in err
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_link_stays_a_link(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    assert run(capsys, *COMMANDS["estimate"], "--format", "html", "-o", str(tmp_path / "link.html"))[0] == 0
    assert (tmp_path / "link.html").is_symlink()
    check((tmp_path / "page.html").read_text(encoding="utf-8"))


# --- pictures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", [[1.0], [6.0, 6, 4, 3, 2, 2, 1], [10**22, 10**15, 1], [1.0] * 50])
def test_boxes_fill_the_picture(values: list[float]) -> None:
    whole = Box(3, 5, 600, 400)
    boxes = divide(values, whole)
    for value, box in zip(values, boxes, strict=True):
        assert box.width * box.height == pytest.approx(600 * 400 * value / sum(values), rel=1e-6, abs=1e-6)
        assert box.x >= 3 - 1e-6
        assert box.y >= 5 - 1e-6
        assert box.x + box.width <= 603 + 1e-6
        assert box.y + box.height <= 405 + 1e-6
    assert all(_overlap(one, other) < 1e-6 for at, one in enumerate(boxes) for other in boxes[:at])


def _overlap(one: Box, other: Box) -> float:
    width = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
    height = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
    return max(width, 0) * max(height, 0)


def test_treemap_of_modules() -> None:
    paths = {"m.layers.*.attn": 10, "m.layers.*.attn.q": 30, "m.layers.*.mlp.up": 40, "head": 20, "m.norm": 0}
    groups, tiles = arrange([Leaf(path, "linear", value) for path, value in paths.items()], Box(0, 0, 100, 100))
    assert [(group.path, group.value) for group in groups] == [
        ("m.layers.*.attn", 40),
        ("m.layers.*.mlp", 40),
        ("head", 20),
    ]
    assert {tile.leaf.path: round(tile.box.width * tile.box.height) for tile in tiles} == {
        "m.layers.*.attn": 1000,
        "m.layers.*.attn.q": 3000,
        "m.layers.*.mlp.up": 4000,
        "head": 2000,
    }
    assert [tile.label for tile in tiles] == ["q", "attn", "up", "head"]
    assert arrange([], Box(0, 0, 1, 1)) == ([], [])


def test_curves() -> None:
    page = draw_curves("t", {"a": [(1, 0.5), (2, None), (3, 0.25), (4, 0.5)]}, x_label="x", y_label="y")
    read = Reader(page)
    assert len(read.list("circle")) == 2  # a point alone, in two widths
    assert thin([(float(x), None if x % 2 else 1.0) for x in range(4000)])[:2] == [(4.5, 1.0), (14.5, 1.0)]
    Reader(draw_curves("t", {"a": [(1, 0.0)]}, x_label="x", y_label="y"))
    Reader(draw_bars("t", [Bar("a", 0, "0"), Bar(HOSTILE, 0, HOSTILE)]))


@pytest.mark.parametrize(
    ("ends", "is_log", "ticks"),
    [
        ((0, 10), False, [0, 2, 4, 6, 8, 10]),
        ((0.0, 0.031), False, [0, 0.01, 0.02, 0.03]),
        ((4, 30), True, [5, 10, 15, 20, 25, 30]),
        ((0.5, 500), True, [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]),
    ],
)
def test_ticks(ends: tuple[float, float], is_log: bool, ticks: list[float]) -> None:
    assert find_ticks(*ends, most=6, is_log=is_log) == pytest.approx(ticks)


def _find_luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _find_contrast(one: str, other: str) -> float:
    low, high = sorted((_find_luminance(one), _find_luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast() -> None:
    for theme in (LIGHT, DARK):
        assert all(_find_contrast(colour, theme["bg"]) >= 3 for colour in PALETTE)
        for ground in ("bg", "soft"):
            assert all(_find_contrast(theme[name], theme[ground]) >= 4.5 for name in ("fg", "muted"))
    assert all(_find_contrast(colour, ON_FILL) >= 4.5 for colour in PALETTE)


def test_elements() -> None:
    assert element("p", HOSTILE, Html("<b>x</b>"), class_='"', hidden=None) == (
        '<p class="&quot;">&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#x27;x<b>x</b></p>'
    )
    assert "<td>&lt;b&gt;</td>" in table(["a", "b"], [("x", "<b>")], text_columns=2)
    assert "\\udcff" in make_page("\udcff", "", [])
