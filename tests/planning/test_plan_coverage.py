"""What a plan says about published runs of its kind."""

from __future__ import annotations

import pytest

from flopcalc import bind, plan
from flopcalc.planning import coverage
from flopcalc.planning.layout import Layout
from flopcalc.planning.network import find_interconnect
from flopcalc.planning.step import LayoutTimer

PLAIN, SHARDED = Layout(dp=8, zero=1), Layout(dp=8, zero=3)

KINDS = {
    "dense, zero 0 to 2": {"runs": 10, "inside": 9, "longer": 0.0},
    "dense, zero 3": {"runs": 4, "inside": 3, "longer": 0.5},
}


def list_notes(device: str = "h200", **settings: object) -> str:
    found = plan("llama-3.1-8b", tokens="1B", device=device, gpus=8, seq_len=4096, global_batch=64, **settings)
    return " ".join(found.notes)


@pytest.mark.parametrize(("device", "is_other"), [("h200", False), ("mi300x", True)])
def test_no_evidence_of_other_devices_is_named(device: str, is_other: bool) -> None:
    notes = list_notes(device, zero=1, tp=1, pp=1)
    assert ("no published training run on AMD Instinct MI300X was compared with a plan" in notes) is is_other
    assert ("published runs on other GPUs" in notes) is is_other
    assert ("published runs of this kind" in notes) is not is_other


@pytest.mark.parametrize(
    ("zero", "longer", "words"),
    [
        (
            1,
            0.0,
            "9 of 10 published runs of this kind (dense, zero 0 to 2) lie inside the interval, and the median one "
            "took as long as predicted",
        ),
        (
            3,
            0.5,
            "3 of 4 published runs of this kind (dense, zero 3) lie inside the interval, and the median one took "
            "50 % longer than predicted",
        ),
        (3, -0.1, "took 10 % shorter than predicted"),
    ],
)
def test_words(monkeypatch: pytest.MonkeyPatch, zero: int, longer: float, words: str) -> None:
    kinds = {**KINDS, "dense, zero 3": {**KINDS["dense, zero 3"], "longer": longer}}
    monkeypatch.setattr(coverage, "load_coverage", lambda: kinds)
    notes = list_notes(zero=zero, tp=1, pp=1)
    assert words in notes
    assert "would be faster" not in notes  # there is no layout of another kind


@pytest.mark.parametrize(
    ("others", "is_told"),
    [
        ([(SHARDED, 10.0), (PLAIN, 14.0)], True),  # 15 s by the median of published runs
        ([(SHARDED, 10.0), (PLAIN, 15.5)], False),
        ([(SHARDED, 10.0), (SHARDED._replace(dp=4, tp=2), 11.0)], False),
        ([], False),
    ],
)
def test_zero_3_is_first_only_with_a_word(
    monkeypatch: pytest.MonkeyPatch, others: list[tuple[Layout, float]], is_told: bool
) -> None:
    monkeypatch.setattr(coverage, "load_coverage", lambda: KINDS)
    estimator = bind("llama-3.1-8b")
    runner = LayoutTimer(estimator, estimator(1, 4096).terms[0][1], "h200", find_interconnect(None, "h200"), 64)
    told = coverage.describe_coverage(runner, SHARDED, others)[1:]
    words = "zero 3 is first by less than published runs of it are off: by their median, dp8 zero1 mb1 would be faster "
    assert told == ([f"{words}(14.00 s a step as predicted)"] if is_told else [])


def test_no_published_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "load_coverage", dict)
    assert "no published run of this kind (dense, zero 0 to 2) was predicted" in list_notes(zero=1)


@pytest.mark.parametrize(("dtype", "below"), [("mxfp8", 0.21), ("mxfp4", 0.38)])
def test_a_format_without_kernels_is_known_less_well(dtype: str, below: float) -> None:
    """Published runs narrow the interval of formats that they trained in, and of no other."""
    found = plan(
        "llama-3.1-8b", tokens="1B", device="b300-sxm", gpus=16, dtype=dtype, tp=1, pp=1, zero=1, micro_batch=8,
        recompute="none", top=1,
    )  # fmt: skip
    assert found.best[0].step.below == pytest.approx(below, abs=0.01)
