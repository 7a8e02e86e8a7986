"""`flopcalc sweep` for real: processes train with Opacus, each leaves its row, log and TensorBoard run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flopcalc.cli import main
from flopcalc.measure.sweep.matrix import TRAINERS


@pytest.mark.heavy
def test_one_trainer_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs, runs = tmp_path / "logs", tmp_path / "runs"
    words = ["--trainer", "DPGhostClippingTrainer", "--batch-size", "2", "--seq-len", "8", "--model-size", "tiny"]
    words += ["--device", "cpu", "--steps", "1", "--warmup", "0", "--logs-dir", str(logs), "--runs-dir", str(runs)]
    with pytest.raises(SystemExit) as end:
        main(["sweep", "single", *words, "--json"])
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    (row,) = json.loads(out)["configurations"]
    assert (row["status"], row["parameters"], row["dtype"], row["device"]) == ("ok", 234_816, "fp32", "cpu")
    assert row["counted_flops"] == row["expected_counted_flops"]
    assert (logs / f"{row['trainer']}_bs2_seq8.log").is_file()
    assert list((runs / f"{row['trainer']}_bs2_seq8").glob("events.out.tfevents.*"))


@pytest.mark.heavy
def test_every_trainer_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    with pytest.raises(SystemExit) as end:
        main(["sweep", "test", "--json", "--logs-dir", str(logs)])
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    summary = json.loads(out)
    rows = summary["configurations"]
    assert [(row["trainer"], row["status"]) for row in rows] == [(trainer, "ok") for trainer in TRAINERS]
    for row in rows:
        assert (row["parameters"], row["dtype"], row["device"], row["model"]) == (234_816, "fp32", "cpu", "tiny")
        assert row["counted_flops"] == row["expected_counted_flops"]
        assert row["flops"]["total"] == sum(row["flops"][part] for part in ("forward", "backward", "clipping"))
        assert (row["flops"]["clipping"] > 0) is (row["trainer"] != "StandardTrainer")
        assert (logs / f"{row['trainer']}_bs2_seq32.log").is_file()
        assert list((logs / "runs" / f"{row['trainer']}_bs2_seq32").glob("events.out.tfevents.*"))
    # The same weights and tokens, so the same loss before the first step.
    assert len({round(row["loss"]["first"], 4) for row in rows}) == 1
    ratios = [row["flops_over_standard"] for row in rows]
    assert ratios[0] == 1.0 < min(ratios[1:])
    assert (logs / "results.jsonl").read_text().count("\n") == 4
