"""Kernel constants from an attention table: exact where rows agree, refused where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc.core.count.formulas import KernelShape
from flopcalc.hardware.kernels import read_kernel_table
from flopcalc.hardware.tables import SHAPES, MeasuredTable


def make_table(rows: list[dict[str, Any]]) -> MeasuredTable:
    columns = SHAPES["attention"].columns
    filled = [tuple(row.get(column) for column in columns) for row in rows]
    return MeasuredTable(
        "attention", "attention.json", {"device": "X", "date": "2026-11-15T00:00:00"}, columns, tuple(filled), ()
    )


def make_rows(kernel: str, qk: int, v: int, block: tuple[int, int], width: tuple[int, int]) -> list[dict[str, Any]]:
    """What a kernel with these blocks and padded widths (forward, backward) would execute."""
    rows = []
    for direction, b, w in (("forward", block[0], width[0]), ("backward", block[1], width[1])):
        products = (qk + v) if direction == "forward" else 3 * qk + 2 * v
        for mask in ("causal", "full"):
            for length in (512, 1024, 4096):
                pairs = length * (length + b) // 2 if mask == "causal" else length * length
                executed = 2 * 8 * pairs * products * w // qk
                rows.append(
                    {"kernel": kernel, "qk_dim": qk, "v_dim": v, "mask": mask, "length": length, "direction": direction,
                     "batch": 2, "heads": 4, "executed_flops": executed}
                )  # fmt: skip
    return rows


@pytest.mark.parametrize(
    ("qk", "v", "block", "width", "shape"),
    [
        (128, 128, (128, 128), (128, 128), KernelShape()),
        (64, 64, (64, 64), (64, 64), KernelShape(64, 64)),
        (128, 128, (96, 128), (128, 128), KernelShape(96, 128)),
        (80, 80, (128, 128), (96, 128), KernelShape(128, 128, (6, 5), (8, 5))),
        (192, 128, (128, 256), (192, 192), KernelShape(128, 256)),
    ],
)
def test_constants_come_out_as_they_went_in(
    qk: int, v: int, block: tuple[int, int], width: tuple[int, int], shape: KernelShape
) -> None:
    table = read_kernel_table(make_table(make_rows("cudnn", qk, v, block, width)), "cudnn")
    assert table is not None
    assert dict(table.shapes) == {(qk, v): shape}
    assert dict(table.ranges) == {(qk, v): (512, 4096)}


def test_rows_that_no_constant_fits_are_not_used() -> None:
    rows = make_rows("flash", 128, 128, (128, 128), (128, 128))
    rows[0]["executed_flops"] += 2**20
    assert read_kernel_table(make_table(rows), "flash") is None


def test_kernel_without_counted_rows() -> None:
    rows = make_rows("flash", 128, 128, (128, 128), (128, 128))
    assert read_kernel_table(make_table(rows), "cudnn") is None
    assert read_kernel_table(make_table([{**row, "executed_flops": None} for row in rows]), "flash") is None


def test_description_says_what_lies_outside() -> None:
    table = read_kernel_table(make_table(make_rows("flash", 128, 128, (128, 128), (128, 128))), "flash")
    assert table is not None
    width = (128, 128)
    assert table.describe({width: {("causal", 1024)}}).endswith("(attention table of 2026-11-15)")
    assert "length 1300 fills no whole block" in table.describe({width: {("causal", 1300)}})
    assert "length 100 lies outside" in table.describe({width: {("causal", 100), ("full", 1280)}})
    assert "windows were not measured" in table.describe({width: {("window", 1024)}})
    assert "no constants for head dim 80, 192/128" in table.describe({(80, 80): {("full", 64)}, (192, 128): set()})


@pytest.mark.parametrize(
    ("preset", "workload", "words"),
    [
        ("llama-3.1-8b", {"seq_len": 2048}, "measured on NVIDIA H200"),
        ("llama-3.1-8b", {"lengths": [300, 500, 1248]}, "length 300, 500 lies outside"),
        ("qwen2.5-vl-7b", {"seq_len": 2048, "image_grid_thw": [[1, 30, 50]]}, "length 12, 48 lies outside"),
        ("qwen2-vl-7b", {"seq_len": 2048, "image_grid_thw": [[1, 30, 50]]}, "by a model of the kernels' tiles"),
        ("mistral-7b", {"seq_len": 8192}, "windows were not measured"),
    ],
)
def test_notes_speak_of_the_calls_that_run(preset: str, workload: dict[str, Any], words: str) -> None:
    from flopcalc import bind

    notes = " ".join(bind(preset, convention="hardware", device="h200")(**workload).notes)
    assert words in notes


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 50,
}  # fmt: skip
ABOUT = {"device": "X", "device_id": "a40", "date": "2026-11-15", "torch": "2", "command": "flopcalc calibrate"}


def test_tile_padding_of_measured_sizes_is_counted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's gemm table: products of exactly those sizes execute what was measured; rows still sum to the total."""
    from flopcalc import bind
    from flopcalc.hardware.tables import save_table

    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    rows = make_rows("flash", 16, 16, (128, 128), (16, 16))
    folder = str(tmp_path / "calibration" / "a40")
    save_table(folder, "attention", ABOUT, rows)
    plain = bind(CONFIG, convention="hardware", device="a40")(2, 64)
    head = {"dtype": "bf16", "m": 128, "n": 50, "k": 64, "mode": "burst"}
    excess = {"forward": 1000, "dgrad": 20, "wgrad": 3}
    save_table(
        folder,
        "gemm",
        ABOUT,
        [{**head, "direction": d, "executed_flops": 2 * 128 * 50 * 64 + more} for d, more in excess.items()],
    )
    padded = bind(CONFIG, convention="hardware", device="a40")(2, 64)
    assert (padded.forward - plain.forward, padded.backward - plain.backward) == (1000, 23)
    assert sum(row.forward + row.backward for row in padded.by_module()) == padded.total
    assert sum(map(sum, padded.by_component().values())) == padded.total
    assert padded.totals["full"] == plain.totals["full"]
    assert any("tile padding of 1 product as measured on X" in note for note in padded.notes)
    frozen = bind(CONFIG, recipe={"freeze": "lm_head"}, convention="hardware", device="a40")(2, 64)
    bare = bind(CONFIG, recipe={"freeze": "lm_head"}, convention="hardware", attention_kernel="flash")(2, 64)
    assert frozen.backward - bare.backward == 20
    assert not any("tile padding" in note for note in bind(CONFIG, convention="hardware", device="a40")(1, 64).notes)
    eager = bind(CONFIG, convention="hardware", device="a40", attention_kernel="eager")(2, 64)
    assert eager.total == eager.totals["full"]


def test_calls_of_exactly_measured_length_are_counted_as_executed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that fills no whole block: the measured call replaces the formula, per head and sequence."""
    from flopcalc import bind
    from flopcalc.hardware.tables import save_table

    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    rows = make_rows("flash", 16, 16, (128, 128), (16, 16))
    folder = str(tmp_path / "calibration" / "a40")
    save_table(folder, "attention", ABOUT, rows)
    by_formula = bind(CONFIG, convention="hardware", device="a40")(5, 300)
    # 300 positions in 3 blocks of 128 each way: 6 blocks of pairs, for 2 sequences of 4 heads.
    pairs = 6 * 128 * 128
    measured = [
        {"kernel": "flash", "qk_dim": 16, "v_dim": 16, "mask": "causal", "length": 300, "direction": direction,
         "batch": 2, "heads": 4, "executed_flops": 8 * pairs * 2 * products * 16}
        for direction, products in (("forward", 2), ("backward", 5))
    ]  # fmt: skip
    save_table(folder, "attention", ABOUT, rows + measured)
    as_measured = bind(CONFIG, convention="hardware", device="a40")(5, 300)
    assert by_formula.by_kind()["attend"][:2] == tuple(3 * 5 * 4 * 2 * n * 16 * (300 * 428 // 2) for n in (2, 5))
    assert as_measured.by_kind()["attend"][:2] == tuple(3 * 5 * 4 * 2 * n * 16 * pairs for n in (2, 5))
    assert sum(row.forward + row.backward for row in as_measured.by_module()) == as_measured.total
    assert "length 300 lies outside" in " ".join(by_formula.notes)
    assert "length 300" not in " ".join(as_measured.notes)
    recomputed = bind(CONFIG, recipe={"recompute": "full"}, convention="hardware", device="a40")(5, 300)
    assert recomputed.by_kind()["attend"][2] == recomputed.by_kind()["attend"][0]
