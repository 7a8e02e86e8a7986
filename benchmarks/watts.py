"""Fit the watts of devices, and show how far they lie off on models and devices that no fit has seen.

    python benchmarks/watts.py points FOLDER              # published rows -> benchmarks/results/watts_published.json
    python benchmarks/watts.py keep JOURNAL               # a calibration's joules -> results/power_calibration.json
    python benchmarks/watts.py keep JOURNAL --later       # the same of a later run, to test with -> power_later.json
    python benchmarks/watts.py report [--page FILE]       # the tables of docs/energy-accuracy.md; puts them there
    python benchmarks/watts.py report --write             # and writes model_specs/watts.json

FOLDER holds serving-energy.csv.gz: ML.ENERGY's runs of vLLM at a steady batch on H100 and B200. Of these, text tasks
count: how many tokens an image or video made, and how long the GPU waited for it, is not published. Prompt lengths of
text tasks are not published either, so the fit finds one length for each task.

The points of an H200 are ours: single calls and settled steps (power_steps.json), three calibrations, one of them with
single calls (power_calibration.json), the test steps of predict_error.py and all blind rounds. All have NVML's joules.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from flopcalc.hardware.devices import find_device  # noqa: E402
from flopcalc.prediction.watts import Shares, draw_power  # noqa: E402

Json = dict[str, Any]
RESULTS = ROOT / "benchmarks" / "results"
PUBLISHED = RESULTS / "watts_published.json"
CALIBRATION = RESULTS / "power_calibration.json"
LATER = RESULTS / "power_later.json"  # of no fit
FITTED = ROOT / "model_specs" / "watts.json"
MARKS = ("<!-- tables of watts.py -->", "<!-- end of tables -->")
HERE = "h200-sxm"
TASKS = ("gpqa", "lm-arena-chat", "sourcegraph-fim")
PROMPT, PROMPT_SPREAD = 300.0, 1.5  # tokens that a task's prompts are drawn to, and how loosely (in logarithms)
START = (0.15, 2.0, 0.8)  # running, compute, memory
ALIKE = 0.3  # how far devices of published rows may lie from each other, in logarithms
NOISE = 0.05  # relative errors below this count by their square


class Point(NamedTuple):
    """One measurement: how busy a device was, and the share of its limit that it drew."""

    device: str
    group: str  # of a table
    model: str
    drawn: float
    shares: Shares
    prompt_flops: float = 0.0  # share of the peak for each token of a prompt, where its length is not known
    task: str = ""
    predicted: Shares | None = None  # with the step's time predicted too
    joules: float = 0.0  # of a step
    predicted_s: tuple[float, float, float] = (0.0, 0.0, 0.0)  # low, middle and high end of its time


# --- Points -----------------------------------------------------------------------------------------------------------
def read_published(folder: Path) -> list[Json]:
    """Shares of the published text rows."""
    from serving_fit import ENERGY_MODELS, load_model

    found = []
    with gzip.open(folder / "serving-energy.csv.gz", "rt", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            name = ENERGY_MODELS.get(line["model"].partition("/")[2])
            if name is None or line["task"] not in TASKS:
                continue
            found.append({"model": name, "hub_id": line["model"], "device": line["device"], "task": line["task"],
                          **count_point(load_model(name, line["weights_format"], None), line)})  # fmt: skip
    return found


def count_point(model: Any, line: dict[str, str]) -> Json:
    """How busy one GPU was in a run of decodes, what a token of a prompt adds, and its watts over its limit."""
    from flopcalc.server.power import MeanStep, count_shares
    from flopcalc.server.step import Deployment

    device, gpus = find_device(line["device"]), int(line["gpus"])
    layout = Deployment(int(line["tp"]), int(line["dp"]), 1, int(line["ep"]))
    batch, output = float(line["batch_mean"]), float(line["output_tokens_mean"])
    decodes = batch / layout.dp
    step = MeanStep(batch / float(line["output_tokens_per_s"]), decodes, PROMPT + output / 2)
    shares = count_shares(model, layout, device, step)
    values = {
        "flops": shares.flops,
        "prompt_flops": count_shares(model, layout, device, step._replace(prompt=decodes / output)).flops
        - shares.flops,
        "bandwidth": shares.bandwidth,
        "drawn": float(line["power_w"]) / gpus / (device.tdp_w or 1),
    }
    return {name: float(f"{value:.5g}") for name, value in values.items()}


def keep_joules(journal: Path) -> Json:
    """What a journal of `flopcalc calibrate --predictor` says of energy; rows of another run took no time in this."""
    first, *lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    records = [line["data"] for line in lines if line["status"] == "ok" and line["seconds"]]
    records = [record for record in records if record.get("energy_j")]
    left = ("operators", "calls")
    cases = [{name: value for name, value in record.items() if name not in left} for record in records]
    return {"provenance": {**first["run"], "command": "flopcalc calibrate --predictor"}, "cases": cases}


def load_published() -> list[Point]:
    rows = json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]
    return [
        Point(row["device"], f"published, {row['device']}", row["model"], row["drawn"],
              Shares(row["flops"], row["bandwidth"]), row["prompt_flops"], row["task"])
        for row in rows
    ]  # fmt: skip


def load_own() -> tuple[list[Point], float]:
    """All measurements of the H200, and the share of its limit that it draws at rest."""
    import predict_error

    from flopcalc import bind
    from flopcalc.measure.predictor import runs
    from flopcalc.measure.predictor.fit.cases import bind_case, find_random, make_machine, model_case, model_cases
    from flopcalc.measure.predictor.fit.clock import read_calls
    from flopcalc.prediction.clock import Clock
    from flopcalc.prediction.host_time import name_mode
    from flopcalc.prediction.kernels.constants import load_shipped
    from lab.blind import steps as blind
    from lab.blind.rounds import NUMBERS, load_round

    constants = load_shipped(HERE)
    assert constants is not None
    machine = make_machine(constants)
    limit_w = machine.device.tdp_w or 1.0
    points: list[Point] = []

    def add(group: str, modelled: Sequence[Any]) -> None:
        for each in modelled:
            case = each.case
            clock = Clock(machine, "compiled" if case["compiled"] else "eager")
            clock.add(each.work, 1, each.load)
            taken = case.get("mean_s") or case["seconds"]
            pace = case["probe_s"] / constants["probe_s"][name_mode(case["phase"])] if "probe_s" in case else 1.0
            said = clock.step_s(pace)
            word = f"{group}: decode" if case["phase"] == "decode" else group
            word += ": LoRA" * ("lora" in case)
            drawn = case["energy_j"] / taken / limit_w
            points.append(Point(HERE, word, case["model"], drawn, clock.find_shares(taken), joules=case["energy_j"],
                                predicted=clock.find_shares(said), predicted_s=clock.interval(pace)))  # fmt: skip

    def read(name: str, key: str = "cases") -> tuple[list[Json], str]:
        path = RESULTS / name
        text = path.read_bytes()
        data = json.loads(gzip.decompress(text) if name.endswith("gz") else text)
        return [row for row in data[key] if row.get("energy_j") and "model" in row], data["provenance"]["transformers"]

    def add_calls(group: str, calls: Sequence[Json]) -> list[float]:
        """Their points, and the shares drawn at rest."""
        called = read_calls(calls, machine, limit_w)
        points.extend(Point(HERE, group, point.name, point.drawn, point.shares, predicted=point.shares)
                      for point in called if point.name != "rest")  # fmt: skip
        return [point.drawn for point in called if point.name == "rest"]

    kept = json.loads((RESULTS / "power_steps.json").read_text(encoding="utf-8"))["rows"]
    calls = [{**row, "power": row["kind"]} for row in kept if "model" not in row and "flops" in row]
    calls += json.loads(CALIBRATION.read_text(encoding="utf-8"))["cases"]
    rest = float(np.mean(add_calls("single calls", calls)))
    add_calls("later: single calls", json.loads(LATER.read_text(encoding="utf-8"))["cases"])
    sources = {
        "settled steps": ("power_steps.json", "rows", runs.get_config),
        "calibration, full": ("predict_profiles.json.gz", "cases", runs.get_config),
        "calibration, quick": ("quick_profiles.json.gz", "cases", runs.get_config),
        "calibration with calls": (CALIBRATION.name, "cases", runs.get_config),
        "test steps": ("predict_cases.json", "cases", predict_error.get_config),
        "later: steps": (LATER.name, "cases", runs.get_config),
    }
    for group, (name, key, configs) in sources.items():
        cases, version = read(name, key)
        add(group, model_cases(cases, configs, HERE, version))
    for number in NUMBERS:
        blind.choose_round(number)
        round_ = load_round(number)
        path = RESULTS / round_.name_result("steps")
        if not path.exists():
            continue
        for case in read(path.name)[0]:
            model = round_.models[case["model"]]
            if case["is_small"]:  # measured with pauses
                continue
            config = dict(model.config)
            if model.adapter is None:
                estimator = bind_case(case, config, HERE)
            else:
                lora = {"r": model.adapter.rank, "targets": list(model.adapter.targets)}
                estimator = bind(config, lora=lora, autocast=model.adapter.is_autocast, recompute=case["recompute"],
                                 convention="hardware", device=HERE, routing=find_random(config))  # fmt: skip
            add(f"blind: {model.kind}", [model_case(case, estimator, blind.VERSION)])
    return points, rest


# --- Fit --------------------------------------------------------------------------------------------------------------
def draw(coefficients: np.ndarray, points: Sequence[Point], lengths: dict[str, float]) -> np.ndarray:
    """Shares of the limit."""
    return np.array([
        draw_power(tuple(coefficients), point.shares._replace(
            flops=point.shares.flops + point.prompt_flops * lengths.get(point.task, 0.0)))
        for point in points
    ])  # fmt: skip


class Fit(NamedTuple):
    """Coefficients by device, of all of them together, and the lengths of prompts."""

    devices: dict[str, np.ndarray]
    shared: np.ndarray
    lengths: dict[str, float]

    def predict(self, point: Point, *, is_end_to_end: bool = False) -> float:
        shares = (point.predicted or point.shares) if is_end_to_end else point.shares
        return float(
            draw(self.devices.get(point.device, self.shared), [point._replace(shares=shares)], self.lengths)[0]
        )


def fit(points: Sequence[Point], idle: float, alike: float = ALIKE) -> Fit:
    """Coefficients of all devices of the points, drawn to each other; every device counts the same."""
    devices = sorted({point.device for point in points})
    tasks = [task for task in TASKS if any(point.task == task for point in points)]
    at = np.array([devices.index(point.device) for point in points])
    task = np.array([tasks.index(point.task) if point.task else -1 for point in points])
    flops, prompt, moved, running, drawn = (
        np.array(column) for column in zip(*[
            (p.shares.flops, p.prompt_flops, p.shares.bandwidth, p.shares.running, p.drawn) for p in points
        ], strict=True)
    )  # fmt: skip
    weight = np.sqrt(len(points) / len(devices) / np.bincount(at)[at])

    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return x[: len(tasks)], x[len(tasks) : len(tasks) + 3], x[len(tasks) + 3 :].reshape(-1, 3)

    def find_residuals(x: np.ndarray) -> np.ndarray:
        lengths, shared, apart = split(x)
        own = np.exp(shared + apart)[at]
        tokens = np.append(np.exp(lengths), 0.0)[task]
        asked = idle + own[:, 0] * running + own[:, 1] * (flops + prompt * tokens) + own[:, 2] * moved
        errors = np.log(asked / (1 + asked**12) ** (1 / 12) / drawn)
        rows = 2 * NOISE * (np.sqrt(1 + (errors / NOISE) ** 2) - 1)  # soft L1
        pulls = [(lengths - np.log(PROMPT)) / PROMPT_SPREAD, apart.ravel() / alike]
        return np.concatenate([weight * np.sqrt(rows / NOISE), *pulls])

    start = np.concatenate([np.full(len(tasks), np.log(PROMPT)), np.log(START), np.zeros(3 * len(devices))])
    lengths, shared, apart = split(least_squares(find_residuals, start).x)
    return Fit(
        {name: np.append(idle, np.exp(shared + apart[i])) for i, name in enumerate(devices)},
        np.append(idle, np.exp(shared)),
        {name: float(np.exp(value)) for name, value in zip(tasks, lengths, strict=True)},
    )


def leave_out(points: Sequence[Point], name: Callable[[Point], str], make: Callable[[list[Point]], Fit]) -> list[Fit]:
    """For each point, the fit that has not seen its name."""
    fits = {each: make([point for point in points if name(point) != each]) for each in {name(p) for p in points}}
    return [fits[name(point)] for point in points]


def find_factors(errors: np.ndarray) -> tuple[float, float]:
    """Factors to the ends that hold nine of ten measurements (split conformal)."""
    ordered, count = np.sort(errors), len(errors)
    low = ordered[max(0, int(np.floor(0.05 * (count + 1))) - 1)]
    high = ordered[min(count - 1, int(np.ceil(0.95 * (count + 1))) - 1)]
    return round(float(np.exp(low)), 3), round(float(np.exp(high)), 3)


# --- Report -----------------------------------------------------------------------------------------------------------
class Row(NamedTuple):
    """A line of a table: errors of some points, as logarithms of measured over predicted."""

    name: str
    errors: np.ndarray
    inside: np.ndarray | None

    def __str__(self) -> str:
        off = np.abs(np.exp(-self.errors) - 1)
        return (
            f"| {self.name} | {len(off)} | {100 * np.median(off):.1f} % | {100 * np.quantile(off, 0.9):.1f} % | "
            f"{'-' if self.inside is None else f'{100 * self.inside.mean():.0f} %'} |"
        )


def compare(points: Sequence[Point], predicted: Sequence[float]) -> np.ndarray:
    return np.log([point.drawn for point in points]) - np.log(predicted)


def are_inside(
    points: Sequence[Point], predicted: Sequence[float], factors: tuple[float, float], most: float
) -> np.ndarray:
    """Whether each measurement lies between the ends that `PowerModel.find` gives."""
    drawn, mid = np.array([point.drawn for point in points]), np.array(predicted)
    return (drawn >= factors[0] * mid) & (drawn <= np.maximum(mid, np.minimum(factors[1] * mid, most)))


def list_table(title: str, rows: Sequence[Row]) -> list[str]:
    head = "| rows | number | median error | nine of ten below | inside the interval |"
    return [f"{title}", "", head, "|---|---|---|---|---|", *map(str, rows), ""]


def report() -> tuple[str, Json]:
    """The tables, and the fitted file."""
    points, idle = load_own()
    own = [point for point in points if not point.group.startswith("later")]
    later = [point for point in points if point.group.startswith("later")]
    published = load_published()
    whole = [*own, *published]
    most = round(float(np.quantile([p.drawn for p in own if p.joules], 0.98)), 3)  # 0.7 s may lie above the limit
    lines: list[str] = []
    intervals: dict[str, tuple[float, float]] = {}

    fits = leave_out(own, lambda p: p.model, lambda kept: fit(kept, idle))
    for is_end_to_end in (False, True):
        said = [each.predict(p, is_end_to_end=is_end_to_end) for each, p in zip(fits, own, strict=True)]
        errors = compare(own, said)
        intervals["measured"] = find_factors(errors)
        inside = are_inside(own, said, intervals["measured"], most)
        groups = [*dict.fromkeys(p.group for p in own)]
        at = {group: np.array([p.group == group for p in own]) for group in groups}
        rows = [Row(group, errors[which], inside[which]) for group, which in at.items()]
        way = "their predicted time" if is_end_to_end else "the time that they took"
        lines += list_table(f"H200, each model left out in turn, with {way}:", [*rows, Row("**all**", errors, inside)])

    # Joules of a step: both ends as `find_energy` joins them.
    steps = [at for at, p in enumerate(own) if p.joules]
    low, high = intervals["measured"]
    limit_w, joules_off, joules_inside = find_device(HERE).tdp_w or 1.0, [], []
    for at in steps:
        point, (fast, mid, slow) = own[at], own[at].predicted_s
        said_j = said[at] * limit_w * mid
        below = np.hypot(1 - low, 1 - fast / mid)
        above = np.hypot(max(0.0, min(high, most / said[at]) - 1), slow / mid - 1)
        joules_off.append(np.log(point.joules / said_j))
        joules_inside.append((1 - below) * said_j <= point.joules <= (1 + above) * said_j)
    rows = [Row("joules of a step", np.array(joules_off), np.array(joules_inside))]
    lines += list_table("Energy of the same steps, watts and time predicted:", rows)

    fits = leave_out(published, lambda p: p.model, lambda kept: fit(kept, idle))
    said = [each.predict(p) for each, p in zip(fits, published, strict=True)]
    errors = compare(published, said)
    intervals["published"] = find_factors(errors)
    inside = are_inside(published, said, intervals["published"], most)
    rows = []
    for device in sorted({p.device for p in published}):
        which = np.array([p.device == device for p in published])
        rows.append(Row(device, errors[which], inside[which]))
    full = np.log([p.drawn for p in published])
    rows += [Row("**all**", errors, inside), Row("all, at the full power limit", full, None)]
    lines += list_table("Published serving runs, each model left out in turn:", rows)

    fits = leave_out(whole, lambda p: p.device, lambda kept: fit(kept, idle))
    said = [each.predict(p) for each, p in zip(fits, whole, strict=True)]
    errors = compare(whole, said)
    devices = sorted({p.device for p in whole})
    # Every device counts the same: each has as many places among the errors.
    picked = [np.quantile(errors[[p.device == d for p in whole]], np.linspace(0, 1, 101)) for d in devices]
    intervals["scaled"] = find_factors(np.concatenate(picked))
    inside = are_inside(whole, said, intervals["scaled"], most)
    rows = []
    for device in devices:
        which = np.array([p.device == device for p in whole])
        rows.append(Row(device, errors[which], inside[which]))
    lines += list_table("A GPU that the fit has not seen, from the two others:", rows)

    mine, theirs, all_ = fit(own, idle), fit(published, idle), fit(whole, idle)
    said = [mine.predict(p, is_end_to_end=True) for p in later]
    errors, inside = compare(later, said), are_inside(later, said, intervals["measured"], most)
    groups = {group: np.array([p.group == group for p in later]) for group in dict.fromkeys(p.group for p in later)}
    rows = [Row(group.removeprefix("later: "), errors[which], inside[which]) for group, which in groups.items()]
    lines += list_table("A later run on another H200, in no fit, with predicted time:",
                        [*rows, Row("**all**", errors, inside)])  # fmt: skip
    names = ("idle", "running", "compute", "memory")

    def make(coefficients: np.ndarray, evidence: str, source: str) -> Json:
        values = {name: round(float(value), 4) for name, value in zip(names, coefficients, strict=True)}
        return {"watts": values, "evidence": evidence, "source": source}

    read = "ML.ENERGY leaderboard data of 2026-02, benchmark v3 (Apache-2.0): vLLM 0.11.1 at a steady batch"
    fitted: Json = {
        "schema": 1,
        "made_by": "python benchmarks/watts.py report --write",
        "devices": {
            HERE: make(mine.devices[HERE], "measured", f"{len(own)} steps and calls on an H200 (benchmarks/results)"),
            **{name: make(value, "published", read) for name, value in theirs.devices.items()},
            "other": make(all_.shared, "scaled", "shares of the power limit on H200, H100 and B200 together"),
        },
        "intervals": {name: list(value) for name, value in intervals.items()},
        "most": most,
    }
    lines += [
        "Shares of the power limit (idle, running, compute, memory): "
        + "; ".join(f"{name} {', '.join(f'{value:g}' for value in entry['watts'].values())}"
                    for name, entry in fitted["devices"].items())
        + ". Intervals: "
        + "; ".join(f"{name} × {low:g} to × {high:g}" for name, (low, high) in intervals.items())
        + f". Tokens of a prompt, fitted: {', '.join(f'{name} {value:.0f}' for name, value in theirs.lengths.items())}."
    ]  # fmt: skip
    return "\n".join(lines), fitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["points", "keep", "report"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--later", action="store_true")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.command != "report" and options.folder is None:
        parser.error("points needs the folder of serving-energy.csv.gz, keep a journal")
    if options.command == "keep":
        kept = keep_joules(options.folder)
        lines = ",\n".join(f"  {json.dumps(case)}" for case in kept["cases"])
        text = f'{{\n "provenance": {json.dumps(kept["provenance"])},\n "cases": [\n{lines}\n ]\n}}\n'
        (LATER if options.later else CALIBRATION).write_text(text, encoding="utf-8")
        return
    if options.command == "points":
        rows = read_published(options.folder)
        source = "ML.ENERGY leaderboard data of 2026-02, benchmark v3, Apache-2.0; text tasks, turned into shares"
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        text = f'{{\n "provenance": {json.dumps({"source": source, "rows": len(rows)})},\n "rows": [\n{lines}\n ]\n}}\n'
        PUBLISHED.write_text(text, encoding="utf-8")
        print(f"{len(rows)} rows")
        return
    text, fitted = report()
    if options.write:
        FITTED.write_text(json.dumps(fitted, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.page is None:
        print(text)
        return
    page = options.page.read_text(encoding="utf-8")
    before, _, rest = page.partition(MARKS[0])
    options.page.write_text(
        f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
