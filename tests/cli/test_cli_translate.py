"""`flopcalc translate` and `flopcalc.translate`: one performance under every convention, and whose a rate is."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from click.testing import CliRunner

import flopcalc
from flopcalc.base.errors import FlopcalcError
from flopcalc.cli import main
from flopcalc.cli.translate import translate
from flopcalc.core.estimate.published_conventions import load_quoted

NAMES = list(load_quoted().conventions)
MODEL = ("--model", "llama-3.1-8b", "--seq", "4096")
ISSUE = (*MODEL, "--mfu", "45%", "--from", "6nd", "--device", "h100-sxm")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(translate, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def read(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json")))


def test_a_quoted_mfu_under_every_convention() -> None:
    found = read(*ISSUE)
    rows = {row["quoted_convention"]: row for row in found["rows"]}
    assert found["quoted_convention"] == "6nd"
    assert list(rows) == NAMES
    assert rows["6nd"]["mfu"] == pytest.approx(0.45)
    assert rows["6nd"]["difference"] == 0
    parameters = 8_030_261_248
    assert rows["6nd"]["flops_per_token"] == 6 * parameters
    assert found["tokens_per_second"] == pytest.approx(0.45 * 989.4e12 / (6 * parameters))
    assert rows["palm"]["mfu"] == pytest.approx(0.45 * (1 + 12 * 32 * 32 * 128 * 4096 / (6 * parameters)))
    assert rows["palm"]["difference"] == pytest.approx(rows["palm"]["mfu"] / 0.45 - 1)
    for row in rows.values():
        assert row["tflops_per_gpu"] == pytest.approx(row["mfu"] * 989.4)
        assert sum(row["terms"].values()) == row["flops"]
        assert row["counts"]
        assert row["leaves_out"]


def test_palm_540b_reached_46_2_percent() -> None:
    """238.3k tokens/s on 6,144 TPU v4 of 275 TFLOP/s (Chowdhery et al. 2022, table 3 and appendix B)."""
    options = ("--tokens-per-second", "238.3k", "--gpus", "6144", "--peak", "275T")
    rows = {row["quoted_convention"]: row for row in read("palm-540b", "--seq", "2048", *options)["rows"]}
    assert round(rows["palm"]["mfu"], 3) == 0.462
    assert round(rows["full"]["mfu"], 3) == 0.462
    assert round(rows["6nd"]["mfu"], 3) == 0.457  # as the paper says of it without self-attention


def test_a_rate_and_many_gpus() -> None:
    found = read(*MODEL, "--tflops", "400", "--from", "palm", "--gpus", "8")
    rows = {row["quoted_convention"]: row for row in found["rows"]}
    assert rows["palm"]["tflops_per_gpu"] == pytest.approx(400)
    assert found["tokens_per_second"] == pytest.approx(8 * 400e12 / rows["palm"]["flops_per_token"])
    assert rows["palm"]["mfu"] is None


def test_tokens_per_second_alone_have_no_difference() -> None:
    found = read(*MODEL, "--tokens-per-second", "9k", "--peak", "989T")
    both = read(*MODEL, "--tokens-per-second", "9k", "--peak", "bf16=989T,fp8=1979T")
    assert both["rows"] == found["rows"]
    assert found["quoted_convention"] is None
    assert {row["difference"] for row in found["rows"]} == {None}
    assert found["rows"][0]["mfu"] == pytest.approx(9000 * found["rows"][0]["flops_per_token"] / 989e12)


@pytest.mark.parametrize(
    ("model", "seq", "pace", "tflops", "first"),
    [
        ("deepseek-v3", 4096, 6288, 1635, "megatron"),  # Megatron-Bridge 26.08
        ("qwen3-30b-a3b", 4096, 45275, 1041, "megatron"),
        ("nemotron-3-super-120b-a12b", 8192, 9900, 839, "megatron"),
        ("llama-3.1-405b", 8192, 1413, 3575, "megatron"),  # dense, so equal to maxtext and model
        ("deepseek-v3", 4096, 2425.75, 607.53, "maxtext"),  # on Ironwood, equal to model
        ("llama-3.1-8b", 8192, 7119.648, 412.319, "full"),  # MaxText before it halved attention
    ],
)
def test_the_convention_that_fits(model: str, seq: int, pace: float, tflops: float, first: str) -> None:
    found = flopcalc.translate(model, seq_len=seq, tokens_per_second=pace, tflops=tflops)
    assert found.is_fit
    assert found.quoted == found.rows[0].name == found.fits[0] == first
    steps = [round(1000 * abs(row.difference or 0)) for row in found.rows]
    assert steps == sorted(steps)


def test_an_mfu_fits_too_and_nothing_fits_a_wrong_one() -> None:
    found = read(*MODEL, "--tokens-per-second", "9000", "--mfu", "1%", "--device", "h100-sxm")
    assert found["is_fit"]
    assert found["quoted_convention"] is None
    assert found["fits"] == []
    assert "no convention fits within 0.5 %" in found["notes"][0]


def test_above_the_peak_is_said_and_not_clamped() -> None:
    found = read(*MODEL, "--mfu", "150%", "--from", "model", "--device", "h100-sxm")
    assert found["rows"][0]["mfu"] == pytest.approx(1.5)
    assert any("above 100 % of the peak under model" in note for note in found["notes"])


def test_verl_says_that_it_reports_nothing() -> None:
    found = flopcalc.translate("mixtral-8x7b", seq_len=128, tokens_per_second=1000.0, tflops=1.0)
    assert "reports 0 for this model type" in found.find("verl").note
    assert not flopcalc.translate("llama-3.1-8b", seq_len=128, tokens_per_second=1000.0).find("verl").note


def test_an_estimate_is_translated_as_it_is() -> None:
    estimate = flopcalc.estimate_flops("llama-3.2-1b", seq_len=512, batch_size=4)
    found = flopcalc.translate(estimate, mfu=0.4, from_="full", device="h100-sxm")
    assert found.find("full").flops == estimate.under("full")
    assert found.find("full").mfu == pytest.approx(0.4)
    with pytest.raises(FlopcalcError, match="already says the work"):
        flopcalc.translate(estimate, seq_len=5, tflops=1.0)
    assert found.to_dict()["quoted_convention"] == "full"


def test_layers_of_prediction_can_be_named() -> None:
    without = read("deepseek-v3", "--seq", "4096", "--tokens-per-second", "1000", "--mtp", "0")
    assert {row["quoted_convention"]: row for row in without["rows"]}["megatron"]["terms"]["mtp"] == 0


def test_the_table_is_narrow_and_complete() -> None:
    text = run(*ISSUE)
    assert max(map(len, text.splitlines())) <= 80
    for name in NAMES:
        assert any(line.startswith(name) for line in text.splitlines())
    fit = run("deepseek-v3", "--seq", "4096", "--tokens-per-second", "6288", "--tflops", "1635")
    assert "nearest first: megatron" in fit
    assert max(map(len, fit.splitlines())) <= 80


def test_other_formats() -> None:
    rows = list(csv.DictReader(io.StringIO(run(*ISSUE, "--format", "csv"))))
    assert [row["quoted_convention"] for row in rows] == NAMES
    assert run(*ISSUE, "--format", "markdown").startswith("## llama-3.1-8b")
    assert json.loads(run(*ISSUE, "--format", "json")) == read(*ISSUE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "what was quoted?"),
        (("--mfu", "45%", "--from", "6nd"), "name the --device"),
        (("--mfu", "45", "--from", "6nd", "--device", "h100-sxm"), "write 45% or 0.45"),
        (("--mfu", "45%", "--device", "h100-sxm"), "whose FLOPs are these?"),
        (("--mfu", "45%", "--device", "h100-sxm", "--from", "plam"), "Did you mean palm"),
        (("--mfu", "45%", "--device", "h100-sxm", "--tflops", "100", "--from", "palm"), "give --mfu or --tflops"),
        (("--tflops", "400", "--tokens-per-second", "9k", "--from", "palm"), "leave --from out"),
        (("--tokens-per-second", "0"), "must be a positive number"),
        (("--tokens-per-second", "9k", "--gpus", "0"), "--gpus must be at least 1"),
        (("--tokens-per-second", "9k", "--mtp", "x"), "--mtp: 'x' is not a whole number"),
        (("--tokens-per-second", "9k", "--json", "--format", "csv"), "contradicts"),
    ],
)
def test_bad_input_is_one_line(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["flopcalc", "translate", *MODEL, *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("value", [0, -0.1, 45, float("nan"), True, "45"])
def test_wrong_shares_in_python(value: Any) -> None:
    with pytest.raises(FlopcalcError):
        flopcalc.translate("llama-3.2-1b", seq_len=8, mfu=value, from_="6nd", device="h100-sxm")
