"""Results in a notebook: short reprs, HTML tables, named rows and pandas frames."""

from __future__ import annotations

import sys
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from flopcalc import FlopcalcError, estimate_flops, plan, predict, serving, translate
from flopcalc.base.rows import FrozenRows, Rows, Table, show_rows
from flopcalc.base.units import format_money, format_seconds
from flopcalc.planning.results import Plan, PlannedRow, Point
from flopcalc.prediction.step import Prediction, TimeRow

TEXT = "qwen2.5-0.5b"


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(TEXT, device="h200", seq_len=128)


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(TEXT, tokens="1B", device="h200", gpus=4, global_batch=16)


class Cells(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            assert tag == "td" or dict(attrs)["scope"] in ("col", "row")
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1][-1] += data


def test_reprs_are_short(prediction: Prediction, found: Plan) -> None:
    estimate = estimate_flops(TEXT, seq_len=128)
    shown: list[Any] = [
        estimate,
        estimate * 3,
        estimate.by_module(),
        estimate.breakdown("kind"),
        estimate.table("module"),
        prediction,
        prediction.memory,
        prediction.rows("module"),
        found,
        found.points,
        found.find_front(),
        found.rows(),
        *found.best,
        *found.losers,
    ]
    for value in shown:
        assert 10 < len(repr(value)) < 300
        assert "\n" not in repr(value)
    assert repr(found).startswith(
        f"Plan({TEXT} on 4 × h200-sxm in bf16: {found.fitting:,} of {found.layouts:,} layouts"
    )
    assert repr(prediction).startswith(f"Prediction({TEXT}, train, 1 × 128 tokens on h200-sxm in bf16, eager: step ")
    assert repr(Rows()) == "Rows(0 rows: )"


def test_rows_are_named(prediction: Prediction, found: Plan) -> None:
    estimate = estimate_flops(TEXT, seq_len=128)
    headers, rows = estimate.breakdown("component")
    assert headers[1:] == ["forward", "backward", "recompute", "clipping"]
    assert sum(row.forward for row in rows) == estimate.forward
    assert [row.path for row in estimate.breakdown("module").rows] == [row.path for row in estimate.by_module()]
    assert sum(row.seconds for row in prediction.rows()) == pytest.approx(prediction.step_time_s.mid)
    assert prediction.rows("module")[0] == TimeRow(
        *next(iter(prediction.modules.items())),
        next(iter(prediction.modules.values())) / sum(prediction.modules.values()),
    )
    assert isinstance(found.points[0], Point)
    assert (
        found.find_front()[0]
        == found.points[0]
        == (found.best[0].step.seconds, found.best[0].memory.peak, found.best[0].layout)
    )
    first = found.rows()[0]
    assert isinstance(first, PlannedRow)
    assert (first.layout, first.dp, first.mfu) == (
        str(found.best[0].layout),
        found.best[0].layout.dp,
        found.best[0].mfu,
    )
    with pytest.raises(FlopcalcError, match="by 'modules' unknown; known: component, module, kind, dtype"):
        estimate.breakdown("modules")
    with pytest.raises(FlopcalcError, match="rows by 'x' unknown; known: kind, module"):
        prediction.rows("x")


def test_notebooks_show_tables(prediction: Prediction, found: Plan) -> None:
    estimate = estimate_flops(TEXT, seq_len=128)
    values: list[tuple[Any, int]] = [
        (estimate, len(estimate.table().rows)),
        (estimate.by_module(), len(estimate.by_module())),
        (estimate.breakdown("kind"), len(estimate.breakdown("kind").rows)),
        (prediction, len(prediction.breakdown)),
        (found, len(found.best)),
        (found.points, min(100, len(found.points))),
    ]
    for value, count in values:
        assert len(Cells(value._repr_html_()).rows) == count + 1
    rows = Cells(estimate.by_module()._repr_html_()).rows
    assert rows[0] == ["path", "kind", "copies", "forward", "backward", "recompute", "clipping", "parameters"]
    assert rows[-1] == [f"{cell:,}" if isinstance(cell, int) else cell for cell in estimate.by_module()[-1]]
    assert "<script>" not in show_rows(["<script>"], [["<script>"]], "<script>")
    assert "… and 1 more rows" in Table(["a"], [[1]] * 101)._repr_html_()


def test_notebooks_show_totals_intervals_costs_and_notes(prediction: Prediction, found: Plan) -> None:
    estimate = estimate_flops(TEXT, seq_len=128)
    quoted = translate(TEXT, seq_len=128, mfu="40%", from_="6nd", device="h200")
    answer = serving(TEXT, device="h100", input_len=128, output_len=32, concurrency=2)
    assert answer.usd is not None
    seconds, best = prediction.step_time_s, found.best[0]
    expected = [
        (estimate, [f"{estimate.total:,} FLOPs", *estimate.notes]),
        (prediction, [f"({format_seconds(seconds.low)} to ", "Wh", "gaps and lower clock", *prediction.notes]),
        (found, [f"{format_seconds(best.step.low)} … ", format_money(best.usd or 0), *found.notes]),
        (quoted, ["quoted under 6nd", "megatron", *quoted.notes]),
        (answer, ["90 % interval", f"${answer.usd['per_hour']:,.2f} an hour", *answer.notes]),
    ]  # fmt: skip
    for value, texts in expected:
        shown = unescape(value._repr_html_())
        assert [text for text in texts if text not in shown] == []
        assert shown.count("<li>") >= len(value.notes)


def test_pandas_frames_hold_the_rows(prediction: Prediction, found: Plan) -> None:
    pytest.importorskip("pandas")
    estimate = estimate_flops("deepseek-v3", batch_size=1024, seq_len=65536)
    frame = estimate.to_pandas("module")
    assert frame["path"].tolist() == [row.path for row in estimate.by_module()]
    assert sum(map(int, frame["forward"])) == estimate.forward > 2**63  # no float in between
    assert estimate.to_pandas().shape == (len(estimate.breakdown("component").rows), 5)
    assert prediction.to_pandas("module")["seconds"].tolist() == list(prediction.modules.values())
    assert found.to_pandas()["step_time_s"].tolist() == [planned.step.seconds for planned in found.best]
    assert found.points.to_pandas()["layout"][0] == str(found.best[0].layout)
    assert FrozenRows().to_pandas().shape == (0, 0)


def test_without_pandas_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FlopcalcError, match=r"to_pandas\(\) needs pandas: pip install .*\[pandas\]"):
        estimate_flops(TEXT, seq_len=8).to_pandas()
