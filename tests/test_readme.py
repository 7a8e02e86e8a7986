"""The README's picture and tables are fresh, and the Chinese pages show the English pages' commands and numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click
import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import make_picture
import make_readme

from flopcalc.cli import _COMMANDS, _group

CHINESE = list(make_readme.PAIRS.items())
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def read_prose(path: Path) -> str:
    return make_readme.FENCE.sub("", path.read_text(encoding="utf-8"))


def list_numbers(path: Path) -> Counter[str]:
    """Numbers of a page outside its code blocks and the targets of its links."""
    text = read_prose(path).replace(" 8 月", "August")  # Chinese counts its months
    return Counter(_NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", text)))


def list_commands(path: Path) -> Counter[str]:
    """What a page sets as code in its text."""
    return Counter(re.findall(r"`([^`\n]+)`", read_prose(path)))


def list_links(path: Path) -> set[str]:
    """Where a page leads; its own language and the other one stand for each other."""
    return {target.replace(".zh-CN", "") for target in re.findall(r"\]\(([^)\s]+)\)", read_prose(path))}


def test_picture_is_fresh() -> None:
    kept = make_picture.PICTURE.read_text(encoding="utf-8")
    assert kept == make_picture.make_picture(), "run python docs/make_picture.py"
    assert "89,406,346,100,736" in kept


def test_a_picture_of_a_command_that_fails_is_refused() -> None:
    with pytest.raises(ValueError, match="ended with exit code 2"):
        make_picture.run_command("flopcalc estimate --model no-such-model --seq 1")


def test_text_in_a_picture_is_escaped() -> None:
    assert "a &lt; b &amp; c" in make_picture.draw("flopcalc", ["a < b & c"])


def test_tables_and_blocks_are_fresh() -> None:
    for path, text in make_readme.make_all().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/make_readme.py"


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table 'tools'"):
        make_readme.fill("README.md", "# flopcalc\n")


def test_a_missing_block_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 code blocks, the Chinese 0"):
        make_readme.copy_blocks("```sh\nflopcalc\n```\n", "")


@pytest.mark.parametrize(("english", "chinese"), CHINESE, ids=[path.name for path, _ in CHINESE])
def test_chinese_page_is_the_english_one(english: Path, chinese: Path) -> None:
    blocks, others = (make_readme.FENCE.findall(path.read_text(encoding="utf-8")) for path in (english, chinese))
    assert blocks == others
    assert list_numbers(english) == list_numbers(chinese)
    assert list_commands(english) == list_commands(chinese)
    assert list_links(english) - {english.name} == list_links(chinese) - {english.name}
    assert len(re.findall("^#+ ", read_prose(english), re.M)) == len(re.findall("^#+ ", read_prose(chinese), re.M))


def test_our_counts_equal_the_counter_on_every_model_of_the_table() -> None:
    rows = make_readme.load_peers()["rows"]
    assert {row["model"] for row in rows} == set(make_readme.FAMILIES)
    assert all(row["flopcalc"] == row["counted"] for row in rows if row["tool"] == "operator counter")


def test_counters_with_eager_attention_are_as_the_readme_says() -> None:
    off = {
        (row["tool"], row["model"]): row["counted"] / row["flopcalc"] - 1
        for row in make_readme.load_peers()["rows"]
        if row["attention"] == "eager" and row["tool"] in ("fvcore", "calflops", "deepspeed")
    }
    assert len(off) == 9
    assert all(abs(value) < 0.001 for (_, model), value in off.items() if model != "mixtral")
    assert all(value < -0.6 for (_, model), value in off.items() if model == "mixtral")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0 %"), (-0.01, "−0.01 %"), (0.017, "+0.02 %"), (-19.0, "−19 %"), (-11.49, "−11.5 %")]
)
def test_percent(value: float, text: str) -> None:
    assert make_readme.format_percent(value) == text


def list_known_options(words: list[str]) -> set[str]:
    """Options of a command, by the first words of its line."""
    command: click.Command | None = _group
    context = click.Context(_group)
    for word in words:
        if not isinstance(command, click.Group):
            break
        command = command.get_command(context, word)
    assert command is not None, words
    return {name for option in command.params for name in option.opts}


def test_commands_of_the_readme_exist_with_their_options() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in re.findall(r"flopcalc ((?:\w+)[^`\n#]*)", text) if line.split()[0] in _COMMANDS]
    assert {line.split()[0] for line in lines} == set(_COMMANDS)
    for line in lines:
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= list_known_options(line.split()), line
    added = {name for cell in re.findall(r"\| add ([^|]+) \|", text) for name in re.findall("--[a-z-]+", cell)}
    assert added
    assert added <= list_known_options(["estimate"])


def test_readme_tells_the_error_of_plans() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "published_runs.json").read_text(encoding="utf-8"))
    found = kept["summary"]["all"]
    assert (
        f"For {found['runs']} published runs on 8 to 16,384 devices the predicted step time has a median error of "
        f"{100 * found['median_error']:.1f} % ({100 * found['worst_error']:.1f} % worst), and "
        f"{100 * found['inside']:.0f} % of the runs lie inside the interval."
    ) in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"Against {found['runs']} published runs on 8 to 16,384 devices, the median error of the step time is "
        f"{100 * found['median_error']:.1f} % ({100 * found['worst_error']:.1f} % worst), and "
        f"{100 * found['inside']:.0f} % of the runs lie inside the interval."
    ) in " ".join((ROOT / "docs" / "planning.md").read_text(encoding="utf-8").split())


def test_readme_is_short_and_begins_with_its_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")
    assert len(lines) < 250
    start = lines.index("```sh")
    assert start < 10  # behind what it is, in a sentence or two
    first, second = lines[start + 1 : start + 3]
    assert first.startswith("pip install . && flopcalc ")
    assert re.match("pip install .*pytest$", second)


def test_no_page_and_no_code_names_documents_that_readers_cannot_see() -> None:
    words = "founding " + "document"
    kept = ["flopcalc", "docs", "tests", "benchmarks", "scripts", "model_specs", "README.md", "CONTRIBUTING.md"]
    paths = [each for name in kept for each in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))]
    texts = [path for path in paths if path.suffix in (".py", ".md", ".toml", ".json", ".csv", ".js")]
    assert [path.name for path in texts if words in path.read_text(encoding="utf-8").lower()] == []


@pytest.mark.heavy
@pytest.mark.parametrize("script", ["docs/make_picture.py", "docs/make_readme.py"])
def test_check_finds_nothing_stale(script: str) -> None:
    done = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
