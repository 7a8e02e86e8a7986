"""README, CONTRIBUTING and docs go in; their commands and code are run, and what they show must be what comes out.

python tests/test_docs.py [PAGE …]   writes docs/cli.md, and the output of every command and Python block into the pages
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flopcalc import estimate_flops
from flopcalc.base.data import list_data_files
from flopcalc.base.number_formats import load_computed
from flopcalc.cli import _COMMANDS, main
from flopcalc.core.formats.quantizers import _READERS
from flopcalc.core.formats.stored import load_stored
from flopcalc.core.spec import expressions as expr
from flopcalc.core.spec import merge, spec
from flopcalc.core.spec.row_units import UNITS
from flopcalc.hardware.devices import load_devices

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import make_cli  # noqa: E402

PAGES = [
    *sorted(ROOT.glob("README*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "lab").rglob("*.md")),
    ROOT / "paper" / "paper.md",
]
# Chinese pages repeat the English pages' blocks: test_readme.py compares them, so they are run once.
RUN_PAGES = [page for page in PAGES if not page.name.endswith(".zh-CN.md")]
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_OUTPUT = re.compile(r"\n\n```text\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block that can be run, and the output that the page shows for it."""

    page: Path
    line: int
    kind: str  # 'console': one command line; 'python': code, its output in a text block right below
    source: str
    shown: str
    start: int  # where the shown output stands in the page
    end: int

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


def find_blocks(page: Path) -> Iterator[Block]:
    """Every block of a page that is run: console, and python that needs no torch."""
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        if fence["info"] == "console":
            command, _, shown = fence["body"].partition("\n")
            start = fence.start("body") + len(command) + 1
            yield Block(page, line, "console", command.removeprefix("$ "), shown, start, fence.end("body"))
        elif fence["info"] == "python":
            output = _OUTPUT.match(text, fence.end())
            shown = output["body"] if output else ""
            start, end = output.span("body") if output else (fence.end(), fence.end())
            yield Block(page, line, "python", fence["body"], shown, start, end)


def find_files(page: Path) -> Iterator[tuple[str, str]]:
    """Files that a page spells out: ```toml NAME, ```json NAME or ```python NAME."""
    for fence in _FENCE.finditer(page.read_text(encoding="utf-8")):
        words = fence["info"].split()
        if len(words) == 2 and words[0] in ("toml", "json", "python"):
            yield words[1], fence["body"]


def run(block: Block, folder: Path) -> tuple[str, int]:
    """What a block prints, and its exit code; commands run in `folder`, beside the page's own files."""
    for name, text in find_files(block.page):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    out = io.StringIO()
    before = Path.cwd()
    load_devices.cache_clear()
    spec.load_spec.cache_clear()
    try:
        os.chdir(folder if block.kind == "console" else ROOT)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            if block.kind == "python":
                exec(compile(block.source, block.name, "exec"), {"__name__": "__main__"})
                return out.getvalue(), 0
            try:
                main(shlex.split(block.source)[1:])
            except SystemExit as error:
                return out.getvalue(), int(error.code or 0)
    finally:
        os.chdir(before)
        load_devices.cache_clear()
        spec.load_spec.cache_clear()
    raise AssertionError("the command line always ends in an exit code")


def set_environment(folder: Path, environment: Any) -> None:
    """No user's own data, no terminal width: a page's commands see the page's `data` folder alone."""
    environment("FLOPCALC_DATA", str(folder / "data"))
    environment("HF_HUB_CACHE", str(folder / "hub"))
    environment("COLUMNS", "80")


BLOCKS = [block for page in RUN_PAGES for block in find_blocks(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(tmp_path, monkeypatch.setenv)
    if block.kind == "console":
        assert block.source.startswith("flopcalc "), "a console block holds one flopcalc command"
    printed, code = run(block, tmp_path)
    assert printed == block.shown, "run `python tests/test_docs.py` to write the output anew, and read the diff"
    assert code == (2 if block.shown.startswith("flopcalc: ") else 0)


def test_a_wrong_number_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(tmp_path, monkeypatch.setenv)
    page = tmp_path / "page.md"
    page.write_text("```console\n$ flopcalc --version\nflopcalc, version 0\n```\n", encoding="utf-8")
    (block,) = find_blocks(page)
    assert run(block, tmp_path)[0] != block.shown == "flopcalc, version 0\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


# What a page says of its evidence, and the rows of the page of evidence that it repeats.
SUMMARIES = [
    ("serving", "8.1 % for the time per output token, 21.6 % for the time to first token and 8.1 % end to end",
     "serving-accuracy", ["| **median of all rows** | 1174 | **8.1 %** | **21.6 %** | **8.1 %** |"]),
    ("serving", "For a GPU that the fit has not seen they are 8.8, 22.0 and 8.4 %",
     "serving-accuracy", ["| **median of all rows** | 1174 | **8.8 %** | **22.0 %** | **8.4 %** |"]),
    ("energy", "4.7 % for watts on an H200 with predicted times, 4.4 % for joules of a step, 6.9 % on published",
     "energy-accuracy", ["| **all** | 840 | 4.7 %", "| joules of a step | 819 | 4.4 %", "| **all** | 204 | 6.9 %"]),
    ("monitor", "takes 117 to 146 µs of host time a step",
     "monitor-cost", ["host time of a step, plain loop | 146 us |", "host time of a step, Trainer | 117 us |"]),
    ("diffusion", "on an H200. All lie inside their interval; in an earlier run one step did not",
     "diffusion-accuracy", ["sd3-medium: one sample, forward    36 ms; predicted  35 ms (18 to 53), inside"]),
]  # fmt: skip


@pytest.mark.parametrize(("page", "text", "evidence", "rows"), SUMMARIES, ids=[text[:30] for _, text, *_ in SUMMARIES])
def test_summaries_repeat_the_evidence(page: str, text: str, evidence: str, rows: list[str]) -> None:
    said, shown = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in (page, evidence))
    assert text in " ".join(said.split())
    assert [row for row in rows if row not in shown] == []
    assert ", outside" not in shown


def _words(page: str) -> set[str]:
    """Everything that a page sets as code."""
    return set(re.findall(r"`([^`\n]+)`", _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))))


def _json_keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _json_keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _json_keys(inner)


def _json_object() -> dict[str, Any]:
    recipe = {"lora": {"r": 2, "targets": "q_proj"}}
    return estimate_flops("qwen2-vl-2b", seq_len=64, image_grid_thw=[[1, 4, 4]], recipe=recipe).to_dict()


COMPLETE = [
    ("docs/specs.md", "keys of a spec", merge.SPEC_KEYS),
    ("docs/specs.md", "keys of a stack", {*spec._STACK_KEYS, *merge.CHANGES}),
    ("docs/specs.md", "keys of an op", set().union(*spec.OP_KEYS.values())),
    ("docs/specs.md", "kinds of op", set(spec.OP_KEYS)),
    ("docs/specs.md", "keys of [vision] and [positions]", spec._VISION_KEYS | spec._POSITION_KEYS),
    ("docs/specs.md", "keys of [audio]", spec._AUDIO_KEYS),
    ("docs/specs.md", "units and their names", {*UNITS, *(name for names in UNITS.values() for name in names)}),
    ("docs/specs.md", "parts, rows and spans", {*spec.PARTS, *spec.ROWS, *spec.SPANS}),
    ("docs/specs.md", "functions", set(expr._FUNCTIONS)),
    ("docs/conventions.md", "keys of the JSON object", set(_json_keys(_json_object()))),
    ("docs/conventions.md", "components", set(spec.PARTS)),
    ("docs/formats.md", "formats", {*load_computed()[0], *load_stored()}),
    ("docs/formats.md", "quantization methods", {name.replace("fbgemm-fp8", "fbgemm_fp8") for name in _READERS}),
    ("docs/cli.md", "commands", {f"flopcalc {name}" for name in _COMMANDS}),
    (
        "docs/models.md",
        "model types",
        {name for name, path in list_data_files("specs").items() if not spec.load_spec(path).is_tower},
    ),
]


@pytest.mark.parametrize(("page", "what", "names"), COMPLETE, ids=[f"{page} {what}" for page, what, _ in COMPLETE])
def test_reference_is_complete(page: str, what: str, names: set[str]) -> None:
    assert not names - _words(page), f"{page} lacks {what}"


def test_commands_and_options_are_fresh() -> None:
    page = make_cli.PAGE.read_text(encoding="utf-8")
    assert page == make_cli.make_page(), "run python docs/make_cli.py"


def test_every_page_is_in_the_index_of_the_site_once() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    entries = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    listed = [line for entry in entries for line in entry.split("\n") if line and not line.startswith(":")]
    names = [re.sub(r".* <(.*)>", r"\1", line) for line in listed]  # a title may stand before it
    pages = {page.relative_to(docs).as_posix().removesuffix(".md") for page in docs.rglob("*.md")} - {"index"}
    others = ("README", "README.zh-CN", "CONTRIBUTING", "CHANGELOG", "SECURITY", "lab/README", "lab/blind/README")
    assert sorted(names) == sorted([*pages, *(f"../{name}" for name in others)])


def test_layers_as_enforced() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = next(contract["layers"] for contract in tool["importlinter"]["contracts"] if contract["type"] == "layers")
    shown = next(
        fence["body"].split("\n")
        for fence in _FENCE.finditer((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))
        if fence["info"] == "text layers"
    )
    rooms = [layer for layer in layers if (ROOT / layer.split(" | ")[0].replace(".", "/")).is_dir()]
    assert [line.strip() for line in shown if line] == [layer.replace("flopcalc.", "") for layer in rooms]


def test_json_block_of_the_reference_is_json() -> None:
    shown = [block.shown for block in BLOCKS if block.page.name == "reference.md" and "--json" in block.source]
    assert shown
    assert all(json.loads(text)["schema"] == 1 for text in shown)


def rewrite(page: Path) -> None:
    """Put what the blocks print now into the page."""
    text = page.read_text(encoding="utf-8")
    for block in reversed(list(find_blocks(page))):
        with tempfile.TemporaryDirectory() as folder:
            set_environment(Path(folder), os.environ.__setitem__)
            printed, _ = run(block, Path(folder))
        if block.kind == "python" and printed and text[: block.start].endswith("\n```"):
            printed = f"\n\n```text\n{printed}```"  # no text block stands below it yet
        text = text[: block.start] + printed + text[block.end :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make_cli.PAGE.write_text(make_cli.make_page(), encoding="utf-8")
    for path in [Path(name).resolve() for name in sys.argv[1:]] or RUN_PAGES:
        rewrite(path)
        print(path.relative_to(ROOT), file=sys.stderr)
