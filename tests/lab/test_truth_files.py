"""Files of truth: read, written, compared and recorded; each way to fail is one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from families import FAMILIES, load_tiny

from flopcalc.base.errors import FlopcalcError
from lab import truth as module
from lab.truth import (
    Case,
    Entry,
    Truth,
    dump,
    find_differences,
    find_folder,
    keep_layers,
    list_entries,
    list_types,
    load,
    parse,
    report,
    run,
)

TRAIN = {"batch": 2, "seq": 13, "phase": "train"}
CASE = Case(TRAIN, {}, 9, 8, {"lm_head": (4, 8, 0), "model.layers.0.mlp": (2, 0, 1)})
TRUTH = Truth(None, (Entry({"model_type": "gpt2", "n_layer": 1}, (CASE,)),), {"torch": "2"})


@pytest.mark.parametrize("name", ["gpt2", "llava", "bert-causal"])
def test_a_file_is_written_as_it_was_read(name: str) -> None:
    text = (find_folder() / "types" / f"{name}.json").read_text(encoding="utf-8")
    assert dump(parse(text)) == text


def test_what_a_file_says() -> None:
    case = CASE._replace(sums=(7, 8, 1))
    truth = TRUTH._replace(entries=(Entry({"model_type": "gpt2"}, (CASE,), (case,), "gpt2"),))
    text = dump(truth)
    assert parse(text) == truth
    assert (CASE.flops, case.flops) == ((6, 8, 1), (7, 8, 1))
    entry = json.loads(text)["configs"][0]
    assert (entry["preset"], entry["paths"]) == ("gpt2", ["lm_head", "model.layers.0.mlp"])
    assert entry["cases"][0]["rows"] == [[0, 4, 8], [1, 2, 0, 1]]


def test_a_case_may_be_asked_for_before_it_is_recorded() -> None:
    asked = '{"schema": 1, "made_with": {}, "architecture": null, "configs": [{"config": {}, "paths": [], "cases": [], '
    asked += '"more": [{"workload": {"seq": 3}, "recipe": {}}]}]}'
    assert parse(asked).cases == [Case({"seq": 3}, {})]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_two_tiny_configs_and_a_published_one(name: str) -> None:
    assert all(len(load_tiny(name, number).all_cases) >= 38 for number in (0, 1))
    (published,) = [entry for entry in load(name).entries if entry.preset]
    assert len(published.more) >= 8
    assert all(case.sums is not None for case in published.more)


def change(truth: Truth, **values: object) -> Truth:
    entry = truth.entries[0]
    return truth._replace(entries=(entry._replace(cases=(entry.cases[0]._replace(**values),)),))  # type: ignore[arg-type]


DIFFERENCES = [
    (TRUTH, []),
    (change(TRUTH, rows={**CASE.rows, "lm_head": (4, 9, 0)}), ["lm_head recorded (4, 8, 0), now (4, 9, 0)"]),
    (change(TRUTH, rows={"lm_head": (4, 8, 0)}), ["model.layers.0.mlp recorded (2, 0, 1), now None"]),
    (change(TRUTH, total=7, sums=(1, 1, 1)), ["total recorded 9, now 7; sums recorded None, now (1, 1, 1)"]),
    (change(TRUTH, recipe={"freeze": ["a"]}), ["was never recorded", "is recorded, and no longer asked for"]),
    (TRUTH._replace(entries=()), ["is recorded, and no longer asked for"]),
    (TRUTH._replace(architecture="Other"), ["recorded None, now Other"]),
]


@pytest.mark.parametrize(("new", "lines"), DIFFERENCES)
def test_differences(new: Truth, lines: list[str]) -> None:
    found = find_differences(TRUTH, new)
    assert len(found) == len(lines)
    assert all(line.endswith(expected) for line, expected in zip(found, lines, strict=True))
    part = find_differences(TRUTH, new, is_part=True)
    assert part == [line for line in found if "no longer" not in line and "architecture" not in line]


def test_a_changed_number_is_found() -> None:
    old = load("gpt2")
    first = old.entries[0]
    rows = {path: (forward, backward + 1, again) for path, (forward, backward, again) in first.cases[0].rows.items()}
    new = old._replace(entries=(first._replace(cases=(first.cases[0]._replace(rows=rows),), more=()),))
    (line,) = find_differences(old, new, is_part=True)
    assert "lm_head recorded" in line


def test_rows_that_are_kept_of_a_published_size() -> None:
    rows = {f"model.layers.{number}.mlp": (number, 0, 0) for number in range(5)}
    rows |= {"visual.blocks.7.attn": (1, 0, 0), "visual.blocks.3.attn": (1, 0, 0), "lm_head": (1, 0, 0)}
    kept = ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.4.mlp", "visual.blocks.7.attn", "lm_head"]
    assert list(keep_layers(rows)) == kept


def test_what_is_recorded_again() -> None:
    """The example's cases, then what the file holds beyond them; a case that the example no longer has is left out."""
    from flopcalc.measure.hf.examples import find_example

    example = find_example("gpt2")
    more = Case({"seq": 5, "phase": "train"}, {})
    stale = Case({"seq": 999, "phase": "train"}, {})
    published = Entry({"model_type": "gpt2"}, (), (more,), "gpt2")
    old = Truth(None, (Entry(example.configs[1], (stale,), (more,)), Entry({"n_layer": 7}, (stale,)), published))
    first, second, third = list_entries(example, old)
    assert [first.config, second.config] == example.configs
    assert (first.more, second.more, third) == ((), (more,), published)
    assert stale not in (*first.cases, *second.cases)
    assert list(list_entries(example, None)) == [first, second._replace(more=())]


def test_record_then_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "types").mkdir()
    monkeypatch.setattr(module, "record", lambda _name, _old: TRUTH)
    assert run("gpt2", tmp_path, check=True) == ("gpt2: was never recorded", True)
    line, failed = run("gpt2", tmp_path, check=False)
    assert (line[:13], failed) == ("gpt2: 1 cases", False)
    assert (list_types(tmp_path), load("gpt2", tmp_path)) == (["gpt2"], TRUTH)
    assert not run("gpt2", tmp_path, check=True)[1]
    monkeypatch.setattr(module, "record", lambda _name, _old: change(TRUTH, total=7))
    line, failed = run("gpt2", tmp_path, check=True)
    assert failed
    assert line.endswith("total recorded 9, now 7")

    def fail(_name: str, _old: Truth) -> Truth:
        raise RuntimeError("operators met and not counted")

    monkeypatch.setattr(module, "record", fail)
    assert run("gpt2", tmp_path, check=True) == ("gpt2: operators met and not counted", True)
    assert load("gpt2", tmp_path) == TRUTH


def test_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_data_dir", lambda: str(tmp_path / "flopcalc" / "model_specs"))
    with pytest.raises(FlopcalcError, match="only a checkout has a folder tests/truth: give --truth DIR"):
        find_folder()
    assert find_folder("here") == Path("here")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("truth", ["herring"], "no example of herring"),
        ("truth", [], "only a checkout has a folder tests/truth: give --truth DIR"),
        ("truth_clipping", ["herring"], "not in model_specs/clipping.toml: herring"),
        ("truth_clipping", [], "only a checkout has a folder tests/truth: give --truth DIR"),
        ("flags", ["herring"], "no example of herring"),
        ("operators.__main__", ["--check", "--out", "x"], "as predict does: leave --out out"),
    ],
)
def test_what_is_refused_is_one_line(
    name: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib import import_module

    command = import_module(f"lab.{name}")
    if not arguments:
        monkeypatch.setattr(module, "find_data_dir", lambda: "/nowhere/model_specs")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    assert report(command.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(message)
