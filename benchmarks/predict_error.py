"""How wrong predictions are: measure cases on a GPU, then compare what `flopcalc predict` says of them.

The protocol, fixed before anything was fitted:

- `measure --part fit` times and profiles the models of flopcalc/measure/tables/runs.py; calibration is made of these.
- `measure --part test` times models, lengths and batches that are in no fit; nobody looks at them before the
  predictor is frozen. Both parts and `again` run on one machine in one go.
- `measure --part host` times small steps of all models, in rounds: what the host takes. Each step is timed between two
  runs of a fixed probe, for a shared host's own speed changes by half and more within seconds: a case is its step over
  the probe, fitted and tested models in turns.
- `measure --part again` repeats some cases of both: the spread between a case and its repetition is the floor.
- The host of fit and test was another one than the probed: how much slower it is (`host_factor`, per phase) is told by
  the steps of the fit part that the host bounds by far.
- `report` predicts every case and prints all errors. A case is called device-bound or host-bound by its prediction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"

MARKS = ("<!-- tables of predict_error.py -->", "<!-- end of tables -->")

# Test models: none is fitted on. Preset, layers kept (text, vision).
TEST: dict[str, tuple[str, int, int]] = {
    "llama-3.1-8b": ("llama-3.1-8b", 10, 0),
    "smollm2-1.7b": ("smollm2-1.7b", 24, 0),
    "tinyllama-1.1b": ("tinyllama-1.1b", 22, 0),
    "qwen2.5-3b": ("qwen2.5-3b", 18, 0),
    "qwen3-4b": ("qwen3-4b", 12, 0),
    "gemma-3-1b": ("gemma-3-1b", 26, 0),
    "olmo-2-7b": ("olmo-2-7b", 7, 0),
    "pythia-1.4b": ("pythia-1.4b", 24, 0),
    "stablelm-2-1.6b": ("stablelm-2-1.6b", 24, 0),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 3, 0),
    "qwen2.5-vl-3b": ("qwen2.5-vl-3b", 18, 32),
    "qwen3-vl-2b": ("qwen3-vl-2b", 28, 24),
    "smollm2-1.7b-short": ("smollm2-1.7b", 6, 0),
}
COMPILED = ("smollm2-1.7b-short",)
GRIDS = {"qwen2.5-vl-3b": [[1, 44, 60]], "qwen3-vl-2b": [[1, 40, 56]]}


def list_test_cases() -> Iterator[Json]:
    from flopcalc.measure.tables.runs import make_case

    for model in TEST:
        if model in COMPILED:
            yield make_case(model, "train", 3, 1536, compiled=True)
            continue
        grids = GRIDS.get(model, [])
        yield make_case(model, "train", 1, 96)
        yield make_case(model, "train", 3, 1536, grids)
        yield make_case(model, "train", 8, 1024 if model == "pythia-1.4b" else 1280, grids)
        yield make_case(model, "train", 1, 2048 if model == "pythia-1.4b" else 6144, grids)
        if model in ("smollm2-1.7b", "qwen2.5-3b", "qwen2.5-vl-3b"):
            yield make_case(model, "train", 4, 1536, grids, recompute="full")
        yield make_case(model, "prefill", 2, 1800, grids)
        yield make_case(model, "decode", 4, 8, context=700)


def list_repeated() -> Iterator[Json]:
    """Cases of both parts that are measured once more at the end."""
    from flopcalc.measure.tables.runs import list_cases

    fit = [case for case in list_cases("full") if case["model"] in ("llama-3.2-1b", "qwen2-vl-2b")]
    yield from (case for case in fit if (case["phase"], case["batch"], case["seq"]) in (
        ("train", 1, 48), ("train", 4, 2048), ("decode", 1, 8)) and case["recompute"] == "none")  # fmt: skip
    yield from (case for case in list_test_cases() if case["model"] in ("smollm2-1.7b", "qwen3-vl-2b"))


def list_host_cases() -> Iterator[Json]:
    """Steps that the device finishes before the host has queued the next; test lengths are not those of the fit."""
    from flopcalc.measure.tables.runs import FIT_GRIDS, MODELS, make_case

    fit = [model for model in MODELS if not model.endswith("-short")]
    test = [model for model in TEST if not model.endswith("-short")]
    for i in range(max(len(fit), len(test))):
        for models, seq, context in ((fit, 64, 512), (test, 96, 700)):
            if i < len(models):
                yield make_case(models[i], "train", 1, seq)
                yield make_case(models[i], "prefill", 1, seq)
                yield make_case(models[i], "decode", 1 if models is fit else 2, 8, context=context)
                grids = (FIT_GRIDS | GRIDS).get(models[i])
                if grids:
                    yield make_case(models[i], "train", 1, 1024 if models is fit else 1200, grids)


def measure_host(out: Path, budget_s: float, device: str) -> None:
    """Rounds over all models until the time is up."""
    from flopcalc.measure.provenance import describe_machine
    from flopcalc.measure.tables import runs

    begun = time.monotonic()
    known = {**runs.MODELS, **TEST}
    runner = runs.Runner(device, lambda name: runs.cut_config(*known[name]))
    found: dict[str, Json] = {}
    failures: dict[str, str] = {}
    number = 0
    while time.monotonic() - begun < budget_s * number / (number + 1) or number == 0:  # a whole round must still fit
        number += 1
        for case in list_host_cases():
            name = runs.name_case(case)
            if name in failures:
                continue
            try:
                record = runner.measure_host(case, 6 if case["phase"] == "decode" or case["grids"] else 12)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"[:300]
                runner.drop()
                continue
            seen = {key: record.pop(key) for key in ("host_s", "probe_s", "ratio", "spread")}
            found.setdefault(name, {**record, "rounds": []})["rounds"].append(seen)
        print(f"{time.monotonic() - begun:6.1f} s  round {number}", flush=True)
        kept = {
            "provenance": describe_machine(device),
            "part": "host",
            "cases": list(found.values()),
            "failures": failures,
        }
        out.write_text(json.dumps(kept))


def _is_profiled(case: Json, part: str) -> bool:
    return part != "again" and (case["phase"] != "train" or (case["batch"], case["seq"]) not in ((1, 320), (2, 1024)))


def measure(part: str, out: Path, budget_s: float, device: str) -> None:
    """Run the cases of one part, in order, and keep what is there after each model."""
    from flopcalc.measure.provenance import describe_machine
    from flopcalc.measure.tables import runs

    begun = time.monotonic()
    cases = {"fit": lambda: runs.list_cases("full"), "test": list_test_cases, "again": list_repeated}[part]()
    known = {**runs.MODELS, **TEST}
    runner = runs.Runner(device, lambda name: runs.cut_config(*known[name]))
    kept: Json = {"provenance": describe_machine(device), "part": part, "cases": []}
    failures: list[Json] = []
    for name, case in {runs.name_case(case): case for case in cases}.items():
        left = budget_s - (time.monotonic() - begun)
        if left < 0:
            failures.append({"case": name, "reason": "no time was left"})
            continue
        try:
            record = runner.measure(case, profiled=_is_profiled(case, part))
            kept["cases"].append(record)
            print(f"{time.monotonic() - begun:6.1f} s  {name}  {record['seconds'] * 1e3:.3f} ms", flush=True)
        except Exception as error:
            failures.append({"case": name, "reason": f"{type(error).__name__}: {error}"[:300]})
            print(f"{time.monotonic() - begun:6.1f} s  {name}  failed: {error}", flush=True)
            runner.drop()
        kept["failures"] = failures
        out.write_text(json.dumps(kept))


# --- Fit and report ---------------------------------------------------------------------------------------------------
def get_config(name: str) -> Json:
    from flopcalc.measure.tables import runs

    return runs.cut_config(*{**runs.MODELS, **TEST}[name])


def fit(profiles: Path, hosts: Path, out: Path) -> None:
    """Make a predictor of the fitted models alone."""
    from flopcalc.calibration import find_table, load_table
    from flopcalc.measure.fit import fit_predictor, save_predictor
    from flopcalc.measure.tables.runs import MODELS

    measured, host = _read(profiles), _read(hosts)
    provenance = {
        **measured["provenance"],
        "command": "benchmarks/predict_error.py fit",
        "date": measured.get("date"),
        "host": host["provenance"].get("commit"),
    }
    stored = {table: find_table(provenance["device_id"], table) for table in ("attention", "gemm")}
    alone = {table: load_table(path).records() if path else [] for table, path in stored.items()}
    constants = fit_predictor(
        measured["cases"], [case for case in host["cases"] if case["model"] in MODELS], get_config, provenance,
        alone["attention"], alone["gemm"],
    )  # fmt: skip
    save_predictor(str(out), constants)


def _read(path: Path) -> Json:
    import gzip

    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: Json = json.loads(data)
    return found


def report(tested: Path, hosts: Path, profiles: Path, out: Path | None) -> str:
    """Every test case: measured, predicted, error, inside the interval or not; then the sums, the two bounds apart."""
    from flopcalc.measure.tables import runs

    test, host = _read(tested), _read(hosts)
    rows: list[Json] = []
    paces = find_paces(_read(profiles)["cases"])
    for case in test["cases"]:
        pace = paces.get(case["phase"], 1.0)
        rows.append(_compare(case, case["seconds"], case["spread"], case.get("peak_memory_bytes"), "wall", pace))
    probe = host_probe(host)
    for case in host["cases"]:
        if case["model"] in TEST:
            ratios = sorted(found["ratio"] for found in case["rounds"])
            seconds = statistics.median(ratios) * probe
            rows.append(_compare(case, seconds, case["rounds"][0]["spread"], None, "host", 1.0))
    summary = [
        _summarize(rows, "wall", "device", "device-bound steps, wall clock"),
        _summarize(rows, "host", "host", "host-bound steps, over the probe"),
        _summarize(rows, "wall", "host", "host-bound steps, wall clock of a shared host"),
        _summarize_memory(rows),
    ]
    if out is not None:
        kept = {"provenance": {"test": test["provenance"], "host": host["provenance"]}, "host_factor": paces,
                "summary": summary, "cases": rows}  # fmt: skip
        out.write_text(json.dumps(kept, indent=1) + "\n")
    return _print_report(rows, summary, runs.name_case)


def find_paces(cases: list[Json]) -> dict[str, float]:
    """Phase -> how many times longer the host of the fit part took than the one that was probed."""
    ratios: dict[str, list[float]] = {}
    for case in cases:
        if case["recompute"] == "none" and not case["compiled"] and case["optimizer"] == "adamw":
            found = _predict(case, 1.0)
            if found.host_s > 2 * found.device_s:
                ratios.setdefault(case["phase"], []).append(case["seconds"] / found.host_s)
    return {phase: round(statistics.median(found), 4) for phase, found in ratios.items()}


def host_probe(host: Json) -> float:
    return statistics.median(found["probe_s"] for case in host["cases"] for found in case["rounds"])


def _predict(case: Json, pace: float) -> Any:
    from flopcalc.prediction.step import predict

    context = {"context": case["context"]} if case["phase"] == "decode" else {}
    images = [grid for _ in range(case["batch"]) for grid in case["grids"]] or None
    return predict(
        get_config(case["model"]), device="h200", optimizer=case["optimizer"], compiled=case["compiled"],
        attention_kernel="eager" if case["attention"] == "eager" else "auto",
        recipe={"recompute": case["recompute"]}, batch_size=case["batch"], seq_len=case["seq"],
        image_grid_thw=images, phase=case["phase"], advise=False, host_factor=pace, **context,
    )  # fmt: skip


def _compare(case: Json, seconds: float, spread: float, memory: int | None, clock: str, pace: float) -> Json:
    found = _predict(case, pace)
    low, mid, high = found.step_time_s
    named = ("model", "phase", "batch", "seq", "context", "grids", "attention", "recompute", "optimizer", "compiled")
    return {
        **{key: case[key] for key in named},
        "clock": clock,
        "measured_s": seconds,
        "spread": spread,
        "predicted_s": round(mid, 6),
        "low_s": round(low, 6),
        "high_s": round(high, 6),
        "error": round(mid / seconds - 1, 4),
        "is_inside": low <= seconds <= high,
        "bound": found.bound,
        "memory_bytes": memory,
        "predicted_bytes": found.memory.peak if found.memory and memory else None,
    }


def _summarize(rows: list[Json], clock: str, bound: str, name: str) -> Json:
    chosen = [row for row in rows if row["clock"] == clock and row["bound"] == bound]
    errors = sorted(abs(row["error"]) for row in chosen)
    if not errors:
        return {"name": name, "cases": 0}
    return {
        "name": name,
        "cases": len(chosen),
        "median": round(statistics.median(errors), 4),
        "worst": errors[-1],
        "bias": round(statistics.fmean(row["error"] for row in chosen), 4),
        "inside": round(sum(row["is_inside"] for row in chosen) / len(chosen), 3),
        "width": round(statistics.fmean((row["high_s"] - row["low_s"]) / row["predicted_s"] for row in chosen), 3),
        "spread": round(statistics.median(row["spread"] for row in chosen), 3),
    }


def _summarize_memory(rows: list[Json]) -> Json:
    errors = sorted(abs(row["predicted_bytes"] / row["memory_bytes"] - 1) for row in rows if row["predicted_bytes"])
    return {"name": "peak memory", "cases": len(errors), "median": round(statistics.median(errors), 4),
            "worst": round(errors[-1], 4)} if errors else {"name": "peak memory", "cases": 0}  # fmt: skip


def _print_report(rows: list[Json], summary: list[Json], name_case: Any) -> str:
    from flopcalc.report import format_grid

    lines = [
        [name_case(row), row["clock"], row["bound"], f"{1e3 * row['measured_s']:.2f}",
         f"{1e3 * row['predicted_s']:.2f}", f"{100 * row['error']:+.1f} %", f"{100 * row['spread']:.0f} %",
         "yes" if row["is_inside"] else "no",
         f"{100 * (row['predicted_bytes'] / row['memory_bytes'] - 1):+.1f} %" if row["memory_bytes"] else ""]
        for row in rows
    ]  # fmt: skip
    head = ["case", "clock", "bound", "measured ms", "predicted ms", "error", "spread", "inside", "memory"]
    sums = [
        [found["name"], found["cases"], *(f"{100 * found[key]:.1f} %" if key in found else "" for key in (
            "median", "worst", "bias", "inside", "width", "spread"))]
        for found in summary
    ]  # fmt: skip
    sum_head = ["what", "cases", "median error", "worst", "bias", "inside", "width", "spread of steps"]
    return format_grid(sum_head, sums, "github") + "\n\n" + format_grid(head, lines, "github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=("measure", "fit", "report"))
    parser.add_argument("--part", choices=("fit", "test", "again", "host"), default="fit")
    parser.add_argument("--out", type=Path, help="where to write; report: also what it found, as JSON")
    parser.add_argument("--page", type=Path, help="report: write the tables between their marks in this page")
    parser.add_argument("--budget-s", type=float, default=600)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profiles", type=Path, default=RESULTS / "predict_profiles.json.gz")
    parser.add_argument("--cases", type=Path, default=RESULTS / "predict_cases.json")
    parser.add_argument("--hosts", type=Path, default=RESULTS / "predict_hosts.json")
    given = parser.parse_args()
    if given.command == "report":
        shown = report(given.cases, given.hosts, given.profiles, given.out)
        print(shown)
        if given.page is not None:
            text = given.page.read_text(encoding="utf-8")
            before, rest = text.split(MARKS[0], 1)
            given.page.write_text(
                f"{before}{MARKS[0]}\n{shown}\n{MARKS[1]}{rest.split(MARKS[1], 1)[1]}", encoding="utf-8"
            )
        return 0
    if given.out is None:
        parser.error(f"{given.command} needs --out FILE")
    if given.command == "fit":
        fit(given.profiles, given.hosts, given.out)
    elif given.part == "host":
        measure_host(given.out, given.budget_s, given.device)
    else:
        measure(given.part, given.out, given.budget_s, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
