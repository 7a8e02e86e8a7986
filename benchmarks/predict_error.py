"""How wrong predictions are: measure cases on a GPU, then compare what `flopcalc predict` says of them.

The protocol, fixed before anything was measured:

- `flopcalc calibrate --predictor` measures the models of flopcalc/measure/predictor/runs.py; the predictor that is
  tested is made of these alone. `keep` takes its records out of the journal into benchmarks/results, `fit` makes the
  predictor of them again.
- `measure` times the models of TEST, at lengths and batches that no fit has seen, on the same machine right after.
  Nobody looks at them before the predictor is frozen, that is committed; then `report` predicts every case once.
- Large steps are timed without pause by the device's clock (`wall`: the middle of all steps). Small ones are timed
  between runs of a fixed probe, since a shared host changes its speed by half from one second to the next (`probe`: the
  middle ratio to the probe around a step, times the middle probe). How long the probe took tells the `host_factor` of
  both; what `predict` says of small steps has the same pause after each.
- Small steps are measured in three rounds, seconds apart: the middle one counts.
- A case is called device-bound or host-bound by its prediction. All cases count and are shown.
- At the end some cases are measured once more: the difference is what a repetition alone makes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile, copytree
from tempfile import TemporaryDirectory
from typing import Any

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"

MARKS = ("<!-- tables of predict_error.py -->", "<!-- end of tables -->")

# Test models: the calibration measures none of them. Preset, layers kept (text, vision).
TEST: dict[str, tuple[str, int, int]] = {
    "deepseek-llm-67b": ("deepseek-llm-67b", 3, 0),
    "deepseek-coder-33b": ("deepseek-coder-33b", 4, 0),
    "falcon3-10b": ("falcon3-10b", 5, 0),
    "yi-6b": ("yi-6b", 8, 0),
    "llama-3.1-minitron-4b-width": ("llama-3.1-minitron-4b-width", 10, 0),
    "mistral-small-24b": ("mistral-small-24b", 4, 0),
    "qwen1.5-110b": ("qwen1.5-110b", 3, 0),
    "qwen2-57b-a14b": ("qwen2-57b-a14b", 3, 0),
    "starcoder2-15b": ("starcoder2-15b", 4, 0),
    "opt-13b": ("opt-13b", 5, 0),
    "japanese-gpt-neox-3.6b": ("japanese-gpt-neox-3.6b", 14, 0),
    "cerebras-gpt-6.7b": ("cerebras-gpt-6.7b", 8, 0),
    "qwen2.5-vl-7b": ("qwen2.5-vl-7b", 10, 6),
    "llava-llama-3-8b": ("llava-llama-3-8b", 6, 24),
    "paligemma-3b-896": ("paligemma-3b-896", 6, 27),
    "olmo-2-1b": ("olmo-2-1b", 16, 0),
    "gemma-3-270m": ("gemma-3-270m", 18, 0),
    "h2o-danube3-500m": ("h2o-danube3-500m", 16, 0),
    "phi-1.5": ("phi-1.5", 24, 0),
    "cerebras-gpt-590m": ("cerebras-gpt-590m", 18, 0),
}
GRIDS = {
    "qwen2.5-vl-7b": [[1, 28, 36]],
    "llava-llama-3-8b": [[1, 24, 24]],
    "paligemma-3b-896": [[1, 64, 64]],
}
_TRAINED = {
    "usual": ((6, 1360), (3, 2464), (1, 6720)),
    "short": ((6, 1360), (4, 1880), (9, 1000)),
    "shown": ((6, 1360), (4, 1880), (3, 2464)),
    "long": ((3, 4320), (2, 4600), (1, 5200)),
}
_SHORT = ("opt-13b", "japanese-gpt-neox-3.6b", "cerebras-gpt-6.7b")  # 2,048 positions
_LONG = ("paligemma-3b-896",)  # 4,096 positions are one image's
_RECOMPUTED = ("falcon3-10b", "mistral-small-24b", "japanese-gpt-neox-3.6b")
_ROUNDS, _STEPS = 3, 10  # of a small step, and how many in each
_REPEATED = ("yi-6b", "llava-llama-3-8b", "h2o-danube3-500m")
# Whole models, small enough for the host to bound them. Of the wide ones few layers are kept, so that the device works
# about as long as the host in the smallest training step, or in every small one: they have other small steps, or none.
_SMALL = ("olmo-2-1b", "gemma-3-270m", "h2o-danube3-500m", "phi-1.5", "cerebras-gpt-590m")
_WIDEST = ("qwen1.5-110b",)
_EXPERTS = ("qwen2-57b-a14b",)
_AGAIN = ("falcon3-10b", "japanese-gpt-neox-3.6b", *_SMALL)  # recomputation in a small step
_SHOWN = ("llava-llama-3-8b",)  # images in a small step


def list_test_cases(model: str) -> Iterator[Json]:
    """Large steps: the device is meant to bound them."""
    from flopcalc.measure.predictor.runs import make_case

    grids = GRIDS.get(model, [])
    if model in _SMALL:
        return
    kind = "long" if model in _LONG else "short" if model in _SHORT else "shown" if grids else "usual"
    asked = (2, 4400) if model in _LONG else (5, 1580)
    for i, (batch, seq) in enumerate(_TRAINED[kind]):
        if grids or i != list(TEST).index(model) % 3:  # of text, two of the three
            yield make_case(model, "train", batch, seq, grids)
    if model in _RECOMPUTED:
        yield make_case(model, "train", 4, 1840, grids, recompute="full")
    yield make_case(model, "prefill", *asked, grids)


def list_host_cases(model: str) -> Iterator[Json]:
    """Small steps: the host is meant to bound them."""
    from flopcalc.measure.predictor.runs import make_case

    if model in _WIDEST:
        return
    if model in _SMALL:
        yield make_case(model, "train", 1, 104)
        yield make_case(model, "train", 2, 304)
        yield make_case(model, "prefill", 2, 304)
    if model in _SHOWN:
        yield make_case(model, "train", 1, 1150, GRIDS[model])
    if model in _AGAIN:
        yield make_case(model, "train", 1, 104, recompute="full")
    if model not in _EXPERTS:
        yield make_case(model, "prefill", 1, 104)
    yield make_case(model, "decode", 3, 2, context=520)


def list_rounds(model: str) -> Iterator[tuple[Json, bool, int]]:
    """A model's cases, whether each is a small step, and its round: large steps once, small ones in every round."""
    yield from ((case, False, 0) for case in list_test_cases(model))
    small = list(list_host_cases(model))
    yield from ((case, True, i) for i in range(_ROUNDS) for case in small)


def measure(out: Path, budget_s: float, device: str) -> None:
    """Run all test cases, model by model, then some of them again; keep what is there after each case.

    Cases that `out` has already are not run again: a run that was stopped goes on.
    """
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.predictor import runs

    begun = time.monotonic()
    runner = runs.Runner(device, get_config)
    kept = _resume(out, describe_machine(device))
    done = {_identify(case) for case in kept["cases"]}
    rounds = [(*each, False) for model in TEST for each in list_rounds(model)]
    rounds += [(*each, True) for model in _REPEATED for each in list_rounds(model) if not each[2]]
    for case, is_host, i, is_again in rounds:
        marked = {**case, "is_host": is_host, "round": i, "is_again": is_again}
        name = runs.name_case(case)
        if _identify(marked) in done:
            continue
        failed = {"case": name, "round": i, "is_again": is_again}
        if time.monotonic() - begun > budget_s:
            kept["failures"].append({**failed, "reason": "no time was left"})
            continue
        try:
            found = runner.measure_host(case, _STEPS) if is_host else runner.measure(case)
            kept["cases"].append({**found, **marked})
            print(f"{time.monotonic() - begun:6.1f} s  {name}", flush=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            kept["failures"].append({**failed, "reason": reason})
            print(f"{time.monotonic() - begun:6.1f} s  {name}  failed: {reason}", flush=True)
            runner.drop()
        out.write_text(json.dumps(kept))
    out.write_text(json.dumps(kept))


def _identify(case: Json) -> tuple[str, bool, int, bool]:
    from flopcalc.measure.predictor import runs

    return runs.name_case(case), case["is_host"], case["round"], case["is_again"]


def join_rounds(cases: list[Json]) -> list[Json]:
    """Of every case, the round in the middle; repetitions stand aside."""
    from flopcalc.measure.predictor import runs

    found: dict[tuple[str, bool], list[Json]] = {}
    for case in cases:
        if not case["is_again"]:
            found.setdefault((runs.name_case(case), case["is_host"]), []).append(case)
    return [sorted(rounds, key=_scale)[(len(rounds) - 1) // 2] for rounds in found.values()]


def _resume(out: Path, provenance: Json) -> Json:
    """What a run before has measured of the same machine; what it had no time for, or failed at, is tried again."""
    if not out.exists():
        return {"provenance": provenance, "cases": [], "failures": []}
    kept = _read(out)
    if kept["provenance"] != provenance or any("round" not in case for case in kept["cases"]):
        raise SystemExit(f"{out} is of another machine or version: give another --out, or remove it")
    return {**kept, "failures": []}


# --- Fit and report ---------------------------------------------------------------------------------------------------
def keep(journal: Path, predictor: Path, out: Path) -> None:
    """The records of a `flopcalc calibrate --predictor` run out of its journal, with what the predictor says of it."""
    _, *lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    records = [line["data"] for line in lines if line["status"] == "ok"]
    failures = [{"case": line["row"], "reason": line["detail"]} for line in lines if line["status"] != "ok"]
    made = {"provenance": _read(predictor)["provenance"], "cases": records, "failures": failures}
    out.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))


def get_config(name: str) -> Json:
    from flopcalc.measure.predictor import runs

    return runs.cut_config(*TEST[name])


def fit(profiles: Path, out: Path, *, is_quick: bool = False) -> None:
    """Make a predictor as `flopcalc calibrate --predictor` does at its end; of the rows of suite quick alone."""
    from flopcalc.hardware.tables import find_table, load_table
    from flopcalc.measure.predictor import runs
    from flopcalc.measure.predictor.fit.predictor import fit_predictor, save_predictor
    from flopcalc.prediction.kernels.constants import load_shipped
    from flopcalc.prediction.kernels.machine import MEASURED_ON

    measured = _read(profiles)
    provenance = measured["provenance"]
    cases = pick_quick(measured["cases"]) if is_quick else measured["cases"]
    paths = {table: find_table(provenance["device_id"], table) for table in ("attention", "gemm")}
    tables = {table: load_table(path).records() if path else [] for table, path in paths.items()}
    constants = fit_predictor(
        cases, runs.get_config, provenance, tables["attention"], tables["gemm"], load_shipped(MEASURED_ON)
    )
    save_predictor(str(out), constants)


def pick_quick(cases: list[Json]) -> list[Json]:
    """The rows of a full calibration that suite quick measures too, each once."""
    from flopcalc.measure.predictor import runs

    asked = {name for job in runs.plan("quick") for name in job.rows}
    found: dict[str, Json] = {}
    for i, case in enumerate(cases):
        if "model" in case:
            found.setdefault(("host/" if case["is_host"] else "") + runs.name_case(case), case)
        elif "units" not in case:
            found[f"call {i}"] = case
    return [case for name, case in found.items() if "model" not in case or name in asked]


def refit(profiles: Path, out: Path) -> None:
    """The shipped predictor with constants of optimizer, host, clock and attention in waves fitted by today's code.

    Model types and kernels that the calibration did not measure are those of host_types.py and single_calls.py; steps
    of other machines are those of the blind tests.
    """
    import host_types
    import single_calls
    from refit import fit_again

    from flopcalc.hardware.tables import find_table, load_table
    from flopcalc.measure.predictor import runs
    from flopcalc.measure.predictor.fit.predictor import save_predictor
    from flopcalc.prediction.kernels.constants import load_shipped
    from flopcalc.prediction.kernels.machine import MEASURED_ON
    from lab.blind import kinds, steps

    constants = load_shipped(MEASURED_ON)
    assert constants is not None
    others = [
        each
        for name in ("types", "kinds", "denoisers")
        for each in host_types.read_steps(RESULTS / f"host_{name}.json")
    ]
    calls, elsewhere = single_calls.read_calls(), steps.read_steps()
    path = find_table(MEASURED_ON, "gemm")
    gemm = load_table(path).records() if path else []
    compiled = list(kinds.read_compiled())
    found = fit_again(constants, _read(profiles)["cases"], runs.get_config, others, calls, elsewhere, gemm, compiled)
    kinds = {kind: each for kind, each in host_types.KINDS.items() if not kind.endswith(host_types.NOT_RECORDED)}
    plain = [kind for kind, entry in kinds.items() if "none" in entry.get("recompute", ["none"])]
    save_predictor(str(out), {**found, "host": {**found["host"], "untried": plain}})


def _read(path: Path) -> Json:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: Json = json.loads(data)
    return found


def report(tested: Path, out: Path | None, predictor: Path | None = None) -> str:
    """Every test case: measured, predicted, error, inside the interval or not; then the sums, the two bounds apart.

    Of the predictor that ships, or of another one of the same device.
    """
    from flopcalc.measure.predictor import runs

    test = _read(tested)
    with calibrated_here(predictor) as constants:
        version = test["provenance"]["transformers"]
        rows = [_compare(case, constants["probe_s"], version) for case in join_rounds(test["cases"])]
    device, host = ([row for row in rows if row["bound"] == bound] for bound in ("device", "host"))
    summary = [
        _summarize(device, "device-bound steps"),
        _summarize(host, "host-bound steps"),
        _summarize(rows, "all steps"),
        _sum_up("peak memory", [abs(row["memory_error"]) for row in rows if row["memory_error"] is not None]),
        _sum_up("the same step, measured once more", _list_repeated(test["cases"])),
    ]
    if out is not None:
        kept = {"provenance": test["provenance"], "predictor": constants["provenance"], "summary": summary,
                "cases": rows, "failures": test["failures"]}  # fmt: skip
        out.write_text(json.dumps(kept, indent=1) + "\n")
    return _print_report(rows, summary, runs.name_case)


@contextmanager
def calibrated_here(predictor: Path | None = None) -> Iterator[Json]:
    """Inside, the predictor that ships, or another, is this machine's own, as on the machine that was measured."""
    from flopcalc.base.data import find_data_dir
    from flopcalc.prediction.kernels.constants import load_predictor
    from flopcalc.prediction.kernels.machine import MEASURED_ON

    before = os.environ.get("FLOPCALC_DATA")
    with TemporaryDirectory() as folder:
        copytree(Path(find_data_dir()) / "predictors", Path(folder) / "predictors")
        if predictor is not None:
            copyfile(predictor, Path(folder) / "predictors" / f"{MEASURED_ON}.json")
        os.environ["FLOPCALC_DATA"] = folder
        load_predictor.cache_clear()
        try:
            constants = load_predictor(MEASURED_ON)
            assert constants is not None
            yield constants
        finally:
            del os.environ["FLOPCALC_DATA"]
            if before is not None:
                os.environ["FLOPCALC_DATA"] = before
            load_predictor.cache_clear()


def _predict(case: Json, pace: float, pause_s: float, version: str) -> Any:
    from flopcalc.api import predict
    from flopcalc.measure.predictor.fit.cases import find_random

    context = {"context": case["context"]} if case["phase"] == "decode" else {}
    images = [grid for _ in range(case["batch"]) for grid in case["grids"]] or None
    return predict(
        get_config(case["model"]),
        device="h200",
        optimizer=case["optimizer"],
        compiled=case["compiled"],
        attention_kernel="eager" if case["attention"] == "eager" else "auto",
        recipe={"recompute": case["recompute"]},
        batch_size=case["batch"],
        seq_len=case["seq"],
        image_grid_thw=images,
        phase=case["phase"],
        advise=False,
        host_factor=pace,
        pause_s=pause_s,
        transformers=version,
        routing=find_random(get_config(case["model"])),
        **context,
    )


def _take(case: Json) -> float:
    """Seconds that count."""
    return float(case["ratio"] * case["probe_s"] if case["is_host"] else case["seconds"])


def _compare(case: Json, probes: Json, version: str) -> Json:
    from flopcalc.prediction.host_time import name_mode

    seconds, pace = _take(case), case["probe_s"] / probes[name_mode(case["phase"])]
    found = _predict(case, pace, case["probe_s"] if case["is_host"] else 0.0, version)
    low, mid, high = found.step_time_s
    named = ("model", "phase", "batch", "seq", "context", "grids", "attention", "recompute", "optimizer", "compiled")
    memory = case.get("peak_memory_bytes")
    return {
        **{key: case[key] for key in named},
        "clock": "probe" if case["is_host"] else "wall",
        "host_factor": round(pace, 3),
        "measured_s": round(seconds, 6),
        "spread": case["spread"],
        "predicted_s": round(mid, 6),
        "low_s": round(low, 6),
        "high_s": round(high, 6),
        "device_s": round(found.device_s, 6),
        "host_s": round(found.host_s, 6),
        "error": round(mid / seconds - 1, 4),
        "is_inside": low <= seconds <= high,
        "bound": found.bound,
        "memory_bytes": memory,
        "memory_error": round(found.memory.peak / memory - 1, 4) if found.memory and memory else None,
    }


def _summarize(rows: list[Json], name: str) -> Json:
    errors = sorted(abs(row["error"]) for row in rows)
    if not errors:
        return {"name": name, "cases": 0}
    return {
        "name": name,
        "cases": len(rows),
        "median": round(statistics.median(errors), 4),
        "worst": errors[-1],
        "bias": round(statistics.fmean(row["error"] for row in rows), 4),
        "inside": round(sum(row["is_inside"] for row in rows) / len(rows), 3),
        "width": round(statistics.fmean((row["high_s"] - row["low_s"]) / row["predicted_s"] for row in rows), 3),
        "spread": round(statistics.median(row["spread"] for row in rows), 3),
    }


def _scale(case: Json) -> float:
    """What a case's measurements are compared by: seconds; of small steps, times of the probe."""
    return float(case["ratio"]) if case["is_host"] else _take(case)


def _list_repeated(cases: list[Json]) -> list[float]:
    """How far a case's repetition lies from the one that counts."""
    from flopcalc.measure.predictor import runs

    first = {(runs.name_case(case), case["is_host"]): case for case in join_rounds(cases)}
    again = [case for case in cases if case["is_again"]]
    return [abs(_scale(case) / _scale(first[runs.name_case(case), case["is_host"]]) - 1) for case in again]


def _sum_up(name: str, errors: list[float]) -> Json:
    if not errors:
        return {"name": name, "cases": 0}
    return {
        "name": name,
        "cases": len(errors),
        "median": round(statistics.median(errors), 4),
        "worst": round(max(errors), 4),
    }


def _print_report(rows: list[Json], summary: list[Json], name_case: Any) -> str:
    from flopcalc.base.text_table import format_grid

    lines = [
        [
            name_case(row),
            row["clock"],
            row["bound"],
            f"{1e3 * row['measured_s']:.2f}",
            f"{1e3 * row['predicted_s']:.2f}",
            f"{100 * row['error']:+.1f} %",
            f"{100 * row['spread']:.0f} %",
            "yes" if row["is_inside"] else "no",
            f"{100 * row['memory_error']:+.1f} %" if row["memory_error"] is not None else "",
        ]
        for row in rows
    ]
    head = ["case", "clock", "bound", "measured ms", "predicted ms", "error", "spread", "inside", "memory"]
    sums = [
        [
            found["name"],
            found["cases"],
            *(
                f"{100 * found[key]:.1f} %" if key in found else ""
                for key in ("median", "worst", "bias", "inside", "width", "spread")
            ),
        ]
        for found in summary
    ]
    sum_head = ["what", "cases", "median error", "worst", "bias", "inside", "width", "spread of steps"]
    return format_grid(sum_head, sums, "github") + "\n\n" + format_grid(head, lines, "github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=("measure", "keep", "fit", "refit", "report"))
    parser.add_argument("--out", type=Path, help="where to write; report: also what it found, as JSON")
    parser.add_argument("--page", type=Path, help="report: write the tables between their marks in this page")
    parser.add_argument("--budget-s", type=float, default=600)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--journal", type=Path, help="keep: journal.jsonl of a calibration")
    parser.add_argument(
        "--predictor", type=Path, help="keep: what that calibration wrote; report: instead of the one that ships"
    )
    parser.add_argument(
        "--profiles", type=Path, default=RESULTS / "predict_profiles.json.gz", help="fit, refit: what was kept"
    )
    parser.add_argument("--quick", action="store_true", help="fit: only what suite quick measures")
    parser.add_argument("--cases", type=Path, default=RESULTS / "predict_cases.json", help="report: what was measured")
    given = parser.parse_args()
    if given.command == "report":
        shown = report(given.cases, given.out, given.predictor)
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
        fit(given.profiles, given.out, is_quick=given.quick)
    elif given.command == "refit":
        refit(given.profiles, given.out)
    elif given.command == "keep":
        if given.journal is None or given.predictor is None:
            parser.error("keep needs --journal FILE and --predictor FILE")
        keep(given.journal, given.predictor, given.out)
    else:
        measure(given.out, given.budget_s, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
