"""benchmarks/dp_sgd.py: one JSON after every configuration, resumable, and the page shows the committed results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sweep_stand_in as stand_in
from places import HELPERS, ROOT

from flopcalc import bind
from flopcalc.base.vocabulary import BASELINE
from flopcalc.cli import main
from flopcalc.measure.sweep.matrix import TRAINERS, find_model

SCRIPT = ROOT / "benchmarks" / "dp_sgd.py"
RESULTS = ROOT / "benchmarks" / "results" / "dp_sgd.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HELPERS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("dp_sgd", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.heavy
def test_every_trainer_at_every_size(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "TINY", {**script.TINY, "batch_sizes": [2]})
    options = script.make_parser().parse_args(["--out", str(tmp_path / "out"), "--tiny", "--steps", "2"])
    swept = script.measure(options, stand_in.CALL)
    assert (len(swept.rows), swept.ran, swept.failed) == (8, 8, 0)
    path = tmp_path / "out" / script.NAME
    found = script.read_results(str(path))
    assert found["provenance"]["command"] == "python benchmarks/dp_sgd.py --steps 2 --warmup 3 --tiny"
    assert found["provenance"]["device"] == "stand-in"
    assert [line.startswith('  {"id": ') for line in path.read_text().splitlines()].count(True) == 8
    assert str(tmp_path) not in path.read_text()
    before = path.stat().st_mtime_ns
    assert script.measure(options, stand_in.CALL).ran == 0
    assert path.stat().st_mtime_ns == before
    # A cut: the rows that the journal lacks are run, and the file is whole again.
    journal = tmp_path / "out" / "work" / "journal.jsonl"
    journal.write_text("".join(line + "\n" for line in journal.read_text().splitlines()[:-3]))
    path.unlink()
    assert script.measure(options, stand_in.CALL).ran == 3
    assert [row["id"] for row in script.read_results(str(path))["rows"]] == [row["id"] for row in swept.rows]


def test_rows_are_written_after_each_configuration(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    write = script.write_results

    def note(rows: Any, path: str, command: str) -> None:
        write(rows, path, command)
        counts.append(len(script.read_results(path)["rows"]))

    monkeypatch.setattr(script, "write_results", note)
    monkeypatch.setattr(script, "TINY", {**script.TINY, "batch_sizes": [2], "seq_lens": [8]})
    options = script.make_parser().parse_args(["--out", str(tmp_path), "--work", str(tmp_path / "w"), "--tiny"])
    script.measure(options, stand_in.CALL)
    assert counts == [1, 2, 3, 4, 4]


def test_the_matrix_of_the_evidence(script: Any) -> None:
    assert script.MATRIX == {"models": ["1b"], "batch_sizes": [4, 8], "seq_lens": [512, 1024], "device": "cuda"}


def test_show_needs_nothing_heavy(script: Any) -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['opacus'] = None; script, path = sys.argv[1:]; "
        "sys.argv = [script, '--show', path]; runpy.run_path(script, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPT), str(RESULTS)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == script.format_tables(script.read_results(str(RESULTS))) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out DIR says where"),
        (["--page", "x.md"], "--page needs --show FILE"),
        (["--show", "OTHER"], "schema 99 is not known, this script reads 1"),
        (["--show", "no.json"], "no.json: cannot be read: "),
        (["--show", str(SCRIPT)], "dp_sgd.py: cannot be read: "),
    ],
)
def test_errors(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "other.json").write_text('{"schema": 99}')
    given = [str(tmp_path / "other.json") if word == "OTHER" else word for word in arguments]
    try:
        code = script.main(given)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_the_committed_results_are_whole() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert {"command", "date", "device", "torch", "transformers", "opacus", "commit"} <= set(found["provenance"])
    assert len(found["rows"]) == 16
    assert {row["trainer"] for row in found["rows"]} == set(TRAINERS)
    assert [row["id"] for row in found["rows"] if row["status"] != "ok"] == []
    # The closed forms are exact: operators of a real step, counted, equal them to the FLOP.
    assert [row["counted_flops"] for row in found["rows"]] == [row["expected_counted_flops"] for row in found["rows"]]


def test_the_page_shows_the_committed_results(script: Any, tmp_path: Path) -> None:
    page = ROOT / "docs" / "dp-sgd.md"
    copy = tmp_path / "page.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    assert script.main(["--show", str(RESULTS), "--page", str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), "python benchmarks/dp_sgd.py --show …"
    assert script.format_tables(script.read_results(str(RESULTS))) in page.read_text(encoding="utf-8")
    copy.write_text("no marks")
    assert script.main(["--show", str(RESULTS), "--page", str(copy)]) == 2


def read_rows() -> dict[tuple[str, int, int], Any]:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return {(row["trainer"], row["batch_size"], row["seq_len"]): row for row in rows}


def test_the_estimate_beforehand_is_the_row_to_the_flop() -> None:
    """What the page says: model, sizes, clipping, convention, device and dtype give the very number."""
    for (trainer, batch, length), row in read_rows().items():
        settings = {"convention": "hardware", "device": row["environment"]["device_id"], "dtype": row["dtype"]}
        estimate = bind(find_model(row["model"]), clipping=TRAINERS[trainer], **settings)(batch, length)
        found = {part: getattr(estimate, part) for part in ("convention", "forward", "backward", "clipping", "total")}
        assert found | {"model_total": estimate.total_under("model")} == row["flops"], row["id"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_command_beforehand(trainer: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        f"estimate --model sweep-1b --batch 4 --seq 512 --clipping {TRAINERS[trainer]} --convention hardware "
        "--device h200 --dtype bf16"
    )
    with pytest.raises(SystemExit) as end:
        main([*asked.split(), "--json"])
    shown = json.loads(capsys.readouterr().out)["flops"]
    row = read_rows()[trainer, 4, 512]["flops"]
    assert (end.value.code, {part: row[part] for part in shown if part in row}) == (
        0,
        {part: value for part, value in shown.items() if part in row},
    )
    assert (set(shown) - set(row), shown["total"]) == ({"recompute"}, row["total"])
    page = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")
    assert (f"$ flopcalc {asked}\n" in page) is (trainer == "DPGhostClippingTrainer")


def test_the_page_reads_the_committed_results_rightly() -> None:
    """Each claim of "How to read it"; where another run does not bear one out, the sentence goes."""
    rows = read_rows()
    gib = {key: row["peak_memory_bytes"] / (1 << 30) for key, row in rows.items()}
    page = (ROOT / "docs" / "dp-sgd.md").read_text(encoding="utf-8")
    measured = [row["measured_over_analytic"] for row in rows.values()]
    assert f"{min(measured):.3f} to {max(measured):.3f}" in page
    for (trainer, batch, length), row in rows.items():
        plain = rows[BASELINE, batch, length]
        extra_flops = row["flops"]["total"] / plain["flops"]["total"]
        slowdown = row["step_time_s"]["median"] / plain["step_time_s"]["median"]
        best = rows[trainer, 8, 1024]
        assert row["tokens_per_s"] <= best["tokens_per_s"]
        if trainer == BASELINE:
            continue
        assert slowdown > extra_flops
        assert slowdown * rows[BASELINE, 8, 1024]["step_time_s"]["median"] >= best["step_time_s"]["median"]
        if trainer == "DPGhostClippingTrainer":
            assert f"{extra_flops:.1f} at {length:,}" in page
        else:
            assert f"{extra_flops:.1f}" == {"DPSGDTrainer": "1.3", "DPFastGradientClippingTrainer": "2.0"}[trainer]
        if trainer == "DPSGDTrainer":
            assert round(gib[trainer, batch, length]) == {4: 23, 8: 33}[batch]
        else:
            assert 2.45 <= gib[trainer, batch, length] - gib[BASELINE, batch, length] < 3.45
    hooks = [rows["DPSGDTrainer", batch, 1024]["step_time_s"] for batch in (4, 8)]
    assert hooks[0]["min"] > hooks[1]["min"]
    assert hooks[0]["median"] > hooks[1]["median"]
    assert round(rows[BASELINE, 4, 512]["parameters"] * 2 / (1 << 30), 1) == 2.5
