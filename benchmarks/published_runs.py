"""Predicts the step times of published training runs from their papers' settings, beside what was printed.

Protocol. Sources in alphabetical order; every second one (the first, third, …) may be used to choose the constants of
model_specs/predictors/defaults.json (planning: overhead, contention, widths of the interval), the others are only
predicted. The split is by source and not by run, since the runs of one source share a framework and a machine. Devices
that only these runs have are in benchmarks/data/machines.

    python benchmarks/published_runs.py --out benchmarks/results/published_runs.json --page docs/plan-accuracy.md
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from pathlib import Path
from statistics import median
from typing import Any

from flopcalc.api import bind
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.config import load_config
from flopcalc.planning.layout import Layout, find_problem
from flopcalc.planning.network import find_interconnect
from flopcalc.planning.seconds import PARTS, Overlaps
from flopcalc.planning.step import LayoutTimer

HERE = Path(__file__).parent
MACHINES = HERE / "data" / "machines"  # a user's own data: devices of these runs that the shipped table does not have
GIB = 1 << 30
BEGIN, END = "<!-- tables of published_runs.json -->", "<!-- end of tables -->"


def load_runs() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    tables = tomllib.loads((HERE / "data" / "published_runs.toml").read_text(encoding="utf-8"))
    sources = tables["source"]
    kernels = {name: {"attention_kernel": each.get("attention_kernel", "auto")} for name, each in sources.items()}
    return sources, [kernels[run["source"]] | run for run in tables["run"]]


def bind_model(run: dict[str, Any]) -> Estimator:
    config = dict(load_config(run["model"]).config) if "model" in run else {}
    return bind(config | run.get("config", {}))


def predict_run(run: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """One run's row: published and predicted step time, where the time goes, memory; `usual`: what its source hides."""
    estimator = bind_model(run)
    load = estimator(1, run["seq"]).terms[0][1]
    runner = LayoutTimer(
        estimator,
        load,
        run["device"],
        find_interconnect(run.get("interconnect"), run["device"]),
        run["global_batch"],
        dtype=run.get("dtype", "bf16"),
        execution=run.get("execution", "fused"),
        attention_kernel=run.get("attention_kernel", "auto"),
        overlaps=Overlaps(**{**usual, **run.get("overlaps", {})}),
    )
    if (MACHINES / "systems" / f"{run['device']}.json").is_file():
        runner.most_error = (
            runner.fitted.published_error
        )  # as narrow an interval as the checked device with the same die has
    layout = choose_layout(run, runner)
    step = runner.time(layout)
    memory = runner.count_memory(layout)
    published = run["step_time_s"]
    return {
        "id": run["id"],
        "source": run["source"],
        "how": run["how"],
        "assumed": run.get("assumed", []),
        "layout": str(layout),
        "devices": f"{run['gpus']} {run['device']}",
        "published_s": published,
        "predicted_s": {"low": step.low, "mid": step.seconds, "high": step.high},
        "error": step.seconds / published - 1,
        "is_inside": step.low <= published <= step.high,
        "breakdown": {name: part / step.seconds for name, part in zip(PARTS, step.parts, strict=True)},
        "memory_gib": memory.peak / GIB,
        "fits": memory.fits(run["device"]),
    }


def choose_layout(run: dict[str, Any], runner: LayoutTimer) -> Layout:
    """The run's layout; what its source leaves open is the fastest that fits, or as written if none does."""
    written = Layout(**run["layout"])
    free = run.get("free", [])
    micro_batches = (1, 2, 4, 8) if "micro_batch" in free else (written.micro_batch,)
    chunks = range(1, runner.model.layers // written.pp + 2) if "virtual" in free else (written.virtual,)
    fitting = []
    for micro_batch in micro_batches:
        for virtual in chunks:
            layout = written._replace(micro_batch=micro_batch, virtual=virtual)
            problem = find_problem(layout, runner.model, run["gpus"], run["global_batch"])
            if problem is not None and not free and "virtual" not in run.get("assumed", []):
                raise SystemExit(f"{run['id']}: {problem[1]}")
            if problem is None and runner.count_memory(layout).fits(run["device"]):
                fitting.append(layout)
    return min(fitting, key=lambda layout: runner.time(layout).seconds) if free and fitting else written


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "runs": len(rows),
        "sources": len({row["source"] for row in rows}),
        "median_error": median(errors),
        "worst_error": errors[-1],
        "inside": sum(row["is_inside"] for row in rows) / len(rows),
        "fits": sum(row["fits"] for row in rows) / len(rows),
        # One number a source: thirty runs of one paper are not thirty papers.
        "median_of_sources": median(
            median(abs(row["error"]) for row in rows if row["source"] == source)
            for source in {row["source"] for row in rows}
        ),
    }


def round_numbers(value: Any) -> Any:
    """Floats to four digits, so that a committed file changes where a number does; zeros are left out."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: round_numbers(entry) for key, entry in value.items() if entry is False or entry != 0}
    return value


def format_row(row: dict[str, Any]) -> str:
    low, mid, high = (row["predicted_s"][key] for key in ("low", "mid", "high"))
    inside = "" if row["is_inside"] else "  outside"
    mark = "t" if row["is_tuned"] else " "
    published = row["published_s"]
    return f"{mark} {row['id']:54} {published:8.2f} {mid:8.2f} {row['error']:+7.1%}  {low:8.2f} {high:8.2f}{inside}"


def format_parts(row: dict[str, Any]) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in row["breakdown"].items() if share > 0.01)
    return f"      {shares}; {row['memory_gib']:.0f} GiB{'' if row['fits'] else ', too much'}"


def format_summary(name: str, numbers: dict[str, Any]) -> str:
    return (
        f"{name:20} {numbers['runs']:3} runs of {numbers['sources']:2} sources: median error "
        f"{numbers['median_error']:6.1%}, worst {numbers['worst_error']:6.1%}, inside {numbers['inside']:4.0%}, "
        f"fits {numbers['fits']:4.0%}"
    )


def format_page(rows: list[dict[str, Any]], summary: dict[str, Any], sources: dict[str, Any]) -> str:
    """Markdown: what the page shows."""
    lines = ["| | runs | median error | worst | inside the interval | memory fits | source |"]
    lines.append("|---|---|---|---|---|---|---|")
    tuned = {row["source"] for row in rows if row["is_tuned"]}
    for name, numbers in summary.items():
        source = f"{sources[name]['paper']}, {sources[name]['url']}" if name in sources else ""
        title = f"{name}{' (t)' if name in tuned else ''}" if name in sources else f"**{name}**"
        lines.append(
            f"| {title} | {numbers['runs']} | {numbers['median_error']:.1%} | {numbers['worst_error']:.1%} | "
            f"{numbers['inside']:.0%} | {numbers['fits']:.0%} | {source} |"
        )
    lines += [
        "",
        "| run | devices | layout | published s | predicted s | error | interval s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, mid, high = (row["predicted_s"][key] for key in ("low", "mid", "high"))
        star = "" if row["how"] == "printed" else "*"
        outside = "" if row["is_inside"] else " **outside**"
        lines.append(
            f"| {row['id']} | {row['devices']} | {row['layout']} | {row['published_s']:.3g}{star} | {mid:.3g} | "
            f"{row['error']:+.1%} | {low:.3g} … {high:.3g}{outside} |"
        )
    return "\n".join(lines)


def write_page(page: Path, tables: str) -> None:
    """The page with these tables between its two marks."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{page}: has no {BEGIN} and {END} to put the tables between")
    page.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    parser.add_argument("--parts", action="store_true", help="print where the time goes too")
    options = parser.parse_args()
    os.environ["FLOPCALC_DATA"] = str(MACHINES)
    sources, runs = load_runs()
    tuned = set(sorted(sources)[::2])
    usual = {name: source.get("overlaps", {}) for name, source in sources.items()}
    rows = [predict_run(run, usual[run["source"]]) | {"is_tuned": run["source"] in tuned} for run in runs]
    print(f"{'t: of a source that constants were chosen by':56} {'publ. s':>8} {'pred. s':>8} {'error':>7}  interval")
    for row in rows:
        print(format_row(row))
        if options.parts:
            print(format_parts(row))
    parts = {"all": rows, "tuned": [], "only predicted": []} | {source: [] for source in sorted(sources)}
    for row in rows:
        parts["tuned" if row["is_tuned"] else "only predicted"].append(row)
        parts[row["source"]].append(row)
    summary = {name: summarize(part) for name, part in parts.items()}
    print()
    for name, numbers in summary.items():
        print(format_summary(name, numbers))
    if options.page:
        write_page(options.page, format_page(rows, summary, sources))
    if options.out:
        lines = ",\n".join(json.dumps(round_numbers(row), ensure_ascii=False) for row in rows)
        head = json.dumps(round_numbers(summary), indent=1)
        options.out.write_text(f'{{"summary": {head},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
