"""Published rows with tokens/s and TFLOP/s go in; docs/published.md, which says whose FLOPs each counts, comes out.

python benchmarks/quoted_rows.py            write the page
python benchmarks/quoted_rows.py --check    exit 1 if the page is stale
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flopcalc import Estimate, Translation, estimate_flops, translate
from flopcalc.core.estimate.published_conventions import QuotedScope
from flopcalc.core.estimate.translation import FIT
from flopcalc.core.model.config import load_config

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "published.md"
DATA = HERE / "data"


class Explained(NamedTuple):
    """One row, the convention that its source counts in, and how well it meets what was printed."""

    row: dict[str, str]
    convention: str
    difference: float  # of the source's convention from the printed rate
    is_first: bool  # no other convention is nearer
    first: str  # the conventions that are nearest, as equals
    variant: str  # a formula of this release that explains it, where the convention does not
    variant_difference: float | None
    rounding: float  # how far the steps in which tokens per second are printed may move the rate

    @property
    def state(self) -> str:
        if abs(self.difference) <= FIT:
            return "explained" if self.is_first else "explained, not nearest"
        if self.variant_difference is not None and abs(self.variant_difference) <= FIT:
            return "by another formula"
        return "unexplained"


@cache
def load_tables() -> dict[str, Any]:
    return tomllib.loads((DATA / "quoted_rows.toml").read_text(encoding="utf-8"))


@cache
def load_rows() -> tuple[dict[str, str], ...]:
    with (DATA / "quoted_rows.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


@cache
def estimate_model(name: str, seq: int) -> Estimate:
    """One training sequence of the preset that a printed name stands for."""
    entry = load_tables()["model"][name]
    config = dict(load_config(entry["preset"]).config) | entry.get("set", {})
    return estimate_flops(config, seq_len=seq)


def find_source(row: dict[str, str]) -> dict[str, Any]:
    return next(each for each in load_tables()["source"] if row["source"].startswith(each["prefix"]))


def find_rounding(row: dict[str, str]) -> float:
    """How far the rounding of what was printed may move FLOPs per token, as a share."""
    pace, rate = (float(row[key]) for key in ("tokens_per_second", "tflops"))
    of_rate = 0.5 / rate if row["tflops"].isdigit() else 0.0
    if row["step_time_s"]:
        return 0.05 / float(row["step_time_s"]) + of_rate
    alike = [each for each in load_rows() if each["source"] == row["source"] and each["seq"]]
    if row["seq"] and all(_has_whole_samples(each) for each in alike):  # it rounds samples per second of all GPUs
        return int(row["seq"]) / int(row["gpus"]) / 2 / pace + of_rate
    return (0.5 / pace if row["tokens_per_second"].isdigit() else 0.0) + of_rate


def _has_whole_samples(row: dict[str, str]) -> bool:
    samples = float(row["tokens_per_second"]) * int(row["gpus"]) / int(row["seq"])
    return samples == round(samples)


def explain(row: dict[str, str]) -> Explained:
    source, entry = find_source(row), load_tables()["model"][row["model"]]
    estimate = estimate_model(row["model"], int(row["seq"] or entry["seq"]))
    mtp = entry.get("mtp", source.get("mtp"))
    pace, rate = float(row["tokens_per_second"]), float(row["tflops"])
    found: Translation = translate(estimate, tokens_per_second=pace, tflops=rate, mtp=mtp)
    convention = entry.get("convention", source["convention"])
    difference = found.find(convention).difference or 0.0
    nearest = [
        each.name
        for each in found.rows
        if round(1000 * abs(each.difference or 0.0)) == round(1000 * abs(found.rows[0].difference))
    ]
    variant, other = _find_variant(row), None
    if variant:
        estimator, load, _ = estimate.terms[0]
        names = {name: [text] for name, text in load_tables()["names"].items()}
        scope = QuotedScope(estimator, load, str(variant.get("mtp", 0)), names)
        flops = scope.evaluate_whole(variant["formula"], variant["name"])
        other = pace * flops / estimate.tokens / (rate * 1e12) - 1
    return Explained(
        row,
        convention,
        difference,
        convention in nearest,
        " = ".join(nearest),
        variant.get("name", ""),
        other,
        find_rounding(row),
    )


def _find_variant(row: dict[str, str]) -> dict[str, Any]:
    for each in load_tables()["variant"]:
        if row["model"] in each["models"] and any(word in row["source"] for word in each["sources"]):
            is_lora = "LoRA" not in each["name"] or row["seq"] == "4096"
            return dict(each) if is_lora else {}
    return {}


@cache
def explain_all() -> tuple[Explained, ...]:
    return tuple(explain(row) for row in load_rows())


def format_share(value: float) -> str:
    text = f"{100 * value:+.2f} %"
    return "0.00 %" if text[1:] == "0.00 %" else text


def make_page() -> str:
    found = explain_all()
    states = Counter(each.state for each in found)
    lines = [
        "# How published rows count FLOPs",
        "",
        "<!-- Written by benchmarks/quoted_rows.py: run it again instead of editing this page. -->",
        "",
        f"{len(found)} published training rows print tokens/s and TFLOP/s. Their ratio is FLOPs per token, so each row",
        "shows in which convention it counts. For every row this page gives the convention of its source, the",
        "difference of our count from the printed value, and the nearest convention. A row is explained if we are",
        "within 0.5 %.",
        "[conventions.md](conventions.md) describes the conventions.",
        "",
        "| result | rows |",
        "|---|---|",
    ]
    lines += [f"| {words} | {states[state]} |" for state, words in _STATES.items()]
    lines += [
        "",
        "`=` joins conventions that agree for a model to 0.1 %: a dense text model has the same FLOPs under",
        "`model`, `megatron` and `maxtext`.",
        "",
        "## Formulas of older releases",
        "",
    ]
    lines += [f"- **{each['name']}**: {each['why']}." for each in load_tables()["variant"]]
    lines += ["", "## Unexplained rows", ""]
    lines += _format_table([each for each in found if each.state == "unexplained"], _UNEXPLAINED)
    lines += [
        "",
        "Rounding is half of the last printed digit of tokens/s and TFLOP/s. It explains any smaller difference.",
        "Megatron-Bridge 26.04.01, 26.06.01 and 26.08 round the samples per second of all GPUs to whole numbers.",
        "",
        "## All rows",
        "",
    ]
    lines += _format_table(list(found), _ALL)
    lines += ["", "## Sources", "", "| source | repository | commit | licence |", "|---|---|---|---|"]
    lines += [
        f"| {each['prefix']} | {each['repository']} | {each['commit'][:9]} | {each['licence']} |"
        for each in load_tables()["source"]
    ]
    return "\n".join(lines) + "\n"


def _format_table(found: list[Explained], columns: dict[str, Any]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(str(read(each)) for read in columns.values()) + " |" for each in found]


def _describe_reason(each: Explained) -> str:
    if abs(each.difference) <= each.rounding:
        return "within the rounding"
    if each.variant:
        return f"{each.variant}: {format_share(each.variant_difference or 0.0)}"
    return "not known"


_STATES = {
    "explained": "the source's convention is nearest, within 0.5 %",
    "explained, not nearest": "the source's convention is within 0.5 %; because of rounding another one is nearer",
    "by another formula": "another formula of that release explains it within 0.5 %",
    "unexplained": "unexplained",
}
_NAMES = {
    "source": lambda each: each.row["source"].removesuffix(" performance summary"),
    "model": lambda each: each.row["model"].replace("|", "/"),
    "hardware": lambda each: f"{each.row['gpus']} {each.row['hardware']} {each.row['precision']}",
    "seq": lambda each: each.row["seq"] or f"{load_tables()['model'][each.row['model']]['seq']} (derived)",
    "tokens/s": lambda each: each.row["tokens_per_second"],
    "TFLOP/s": lambda each: each.row["tflops"],
    "counts in": lambda each: each.convention,
    "difference": lambda each: format_share(each.difference),
}
_UNEXPLAINED = {**_NAMES, "rounding": lambda each: f"± {100 * each.rounding:.2f} %", "reason": _describe_reason}
_ALL = {**_NAMES, "nearest": lambda each: each.first, "result": lambda each: each.state}


if __name__ == "__main__":
    page = make_page()
    if "--check" in sys.argv:
        if PAGE.read_text(encoding="utf-8") != page:
            print("docs/published.md is stale: run python benchmarks/quoted_rows.py", file=sys.stderr)
            sys.exit(1)
    else:
        PAGE.write_text(page, encoding="utf-8")
