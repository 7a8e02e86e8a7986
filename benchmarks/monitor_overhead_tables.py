"""The results of monitor_overhead.py: its file, its goals and its tables. Needs no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Results = dict[str, Any]

SCHEMA = 2
MEASURED_PARTS = ("host", "arms", "measured", "agreement", "waiting")
PARTS = ("provenance", *MEASURED_PARTS, "problems")  # lists of rows, by model
PROMISED_PERCENT = {"estimate": 0.1, "smart": 0.5, "profiler": 5.0}  # of a step, at most
MODES = ("estimate", "smart")
ARMS = ("none", "none2", *MODES)
RUN_STEPS = 2000  # what an overhead is stated over
FREQUENCY = 500  # the default
HOST_LIMIT_US, AGREEMENT_LIMIT_PERCENT = 150.0, 1.0
LOOPS = ("plain loop", "Trainer")
PAGE_BEGIN, PAGE_END = "<!-- Begin of the measured figures. -->", "<!-- End of the measured figures. -->"
MASK, NO_MASK, SAME_MASK = "mask on the device", "no mask", "the same mask in every step"


def make_results() -> Results:
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    return {"schema": SCHEMA, "promised_percent": PROMISED_PERCENT, **parts, "goals": []}


def read_results(path: str) -> Results:
    with open(path, encoding="utf-8") as file:
        results: Results = json.load(file)
    if results.get("schema") != SCHEMA:
        raise SystemExit(f"{path} has schema {results.get('schema')!r}, this script reads {SCHEMA}: run it again")
    return results


def drop_model(results: Results, model: str) -> None:
    for part in PARTS:
        results[part] = [row for row in results[part] if row["model"] != model]


def trim_history(about: Row | None, measured_since: Iterable[str]) -> Row | None:
    """A provenance and those before it, without the ones whose parts were all measured again since."""
    if about is None:
        return None
    since = set(measured_since)
    own = set(MEASURED_PARTS).intersection(about.get("parts", MEASURED_PARTS)) - since
    before = trim_history(about.get("before"), since | own)
    return {**about, "before": before} if own else before


def write_results(results: Results, path: str) -> None:
    """Goals judged anew; one row a line; replaced as a whole."""
    for part in PARTS:
        results[part] = [_plain(row) for row in results[part]]
    results["goals"] = [_plain(row) for row in judge(results)]
    texts = []
    for key, value in results.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False, allow_nan=False) for row in value)
            texts.append(f' "{key}": [\n{lines}\n ]' if value else f' "{key}": []')
        else:
            texts.append(f' "{key}": {json.dumps(value)}')
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(texts) + "\n}\n")
    os.replace(f"{path}.new", path)


def _plain(value: Any) -> Any:
    """Six digits, and null for what is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def join_results(paths: Iterable[str]) -> Results:
    """Models of several files; the last file that has a model counts."""
    results = make_results()
    for path in paths:
        found = read_results(path)
        for name in [row["model"] for row in found["provenance"]]:
            drop_model(results, name)
        for part in PARTS:
            results[part] += found[part]
    return results


def judge(results: Results) -> list[Row]:
    """Each goal of each model: its value, its limit, and whether it is met; None where it cannot be judged."""
    return [goal for about in results["provenance"] for goal in _judge_model(results, about)]


def _judge_model(results: Results, about: Row) -> list[Row]:
    model = about["model"]
    goals: list[Row] = []

    def add(goal: str, value: float | None, limit: float | None, unit: str, note: str) -> None:
        is_met = None if value is None or limit is None or about["is_tiny"] else value <= limit
        goals.append(
            {"model": model, "goal": goal, "value": value, "limit": limit, "unit": unit, "met": is_met, "note": note}
        )

    host = find_rows(results, "host", model)
    for loop in LOOPS:
        row = next((row for row in host if (row["loop"], row["mode"], row["what"]) == (loop, "smart", MASK)), {})
        add(
            f"host time of a step, {loop}",
            row.get("host_us_mean"),
            HOST_LIMIT_US,
            "us",
            f"mean of {row.get('steps')} steps, {MASK}, default mode; "
            f"standard error {format_number(row.get('host_us_se'))}, median {format_number(row.get('host_us_median'))}",
        )
    arms = {row["arm"]: row for row in find_rows(results, "arms", model)}
    noise = arms.get("none2", {})
    limit = None
    if noise.get("difference_se_us") is not None:
        limit = abs(noise["difference_us"]) + 2 * noise["difference_se_us"]
    for mode in MODES:
        row = arms.get(mode, {})
        add(
            f"{mode}: step time beyond none",
            row.get("difference_us"),
            limit,
            "us",
            "limit: the noise of the run, the difference of none2 and two of its standard errors; "
            f"standard error here {format_number(row.get('difference_se_us'))}",
        )
    measured = {row["mode"]: row for row in find_rows(results, "measured", model)}
    add(
        f"smart: over {RUN_STEPS:,} steps",
        find_share_percent(results, model, "smart"),
        PROMISED_PERCENT["smart"],
        "%",
        f"from host time and {RUN_STEPS // FREQUENCY} measured steps ({measured.get('smart', {}).get('source')})",
    )
    found = next(iter(find_rows(results, "agreement", model)), {})
    ratio = found.get("ratio")
    note = str(found.get("reason"))
    if ratio is not None:
        alone = format_number(found.get("estimate_ratio"), 5)
        note = f"ratio {format_number(ratio, 5)} in mode smart; the analytic count alone {alone}"
    add(
        "reported HFU against counted FLOPs ÷ time",
        None if ratio is None else 100 * abs(ratio - 1),
        AGREEMENT_LIMIT_PERCENT,
        "%",
        note,
    )
    checks = find_rows(results, "waiting", model)
    is_known = len(checks) == 3 and all(row["control_raised"] and row["mfu_is_known"] for row in checks)
    add(
        "waits for the device",
        float(sum(len(row["raised"]) for row in checks)) if is_known else None,
        0.0,
        "",
        "; ".join(f"{row['what']}: {', '.join(row['raised']) or 'none'}" for row in checks),
    )
    return goals


def find_share_percent(results: Results, model: str, mode: str) -> float | None:
    """Overhead over the run's steps: host time of every step, and what its measured ones cost beyond that."""
    arms = {row["arm"]: row for row in find_rows(results, "arms", model)}
    host = {row["mode"]: row for row in find_rows(results, "host", model) if row["loop"] == "plain loop"}
    measured = {row["mode"]: row for row in find_rows(results, "measured", model)}
    step_us = arms.get("none", {}).get("step_us_mean")
    host_us = host.get(mode if mode in MODES else "estimate", {}).get("host_us_mean")
    extra_ms = 0.0 if mode == "estimate" else measured.get(mode, {}).get("extra_ms")
    if step_us is None or host_us is None or extra_ms is None:
        return None
    return 100 * (host_us * RUN_STEPS + 1e3 * extra_ms * RUN_STEPS / FREQUENCY) / (RUN_STEPS * step_us)


def find_rows(results: Results, part: str, model: str) -> list[Row]:
    return [row for row in results[part] if row["model"] == model]


def format_number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def format_pair(row: Row, value: str, error: str) -> str:
    return f"{format_number(row.get(value))} ± {format_number(row.get(error))}"


def format_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def format_table(results: Results) -> str:
    """Markdown: host time, step times, measured steps, and the goals."""
    texts = []
    for about in results["provenance"]:
        model = about["model"]
        texts.append(
            f"**{model}**: {about['parameters']:,} parameters, {about['rows']} × {about['length']} tokens a step, "
            f"{about['device']}, torch {about['torch']}, {about['date'][:10]}"
        )
        texts += [
            format_rows(header, rows)
            for header, rows in (_list_host(results, model), _list_arms(results, model), _list_measured(results, model))
            if rows
        ]
    goals = [
        (
            row["model"],
            row["goal"],
            f"{format_number(row['value'])} {row['unit']}".strip(),
            f"{format_number(row['limit'])} {row['unit']}".strip(),
            {True: "yes", False: "**no**", None: "not judged"}[row["met"]],
            row["note"],
        )
        for row in results["goals"]
    ]
    texts.append(format_rows(("model", "goal", "value", "limit", "met", "note"), goals))
    texts += [f"{row['model']}, {row['part']}: {row['reason']}" for row in results["problems"]]
    return "\n\n".join(texts)


def write_page(page: str, table: str) -> None:
    """Replace the tables of a page, which lie between two comments."""
    with open(page, encoding="utf-8") as file:
        text = file.read()
    try:
        head, rest = text.split(PAGE_BEGIN)
        _, tail = rest.split(PAGE_END)
    except ValueError:
        raise SystemExit(f"{page} needs the lines {PAGE_BEGIN!r} and {PAGE_END!r}, once each") from None
    with open(page, "w", encoding="utf-8") as file:
        file.write(f"{head}{PAGE_BEGIN}\n\n{table}\n\n{PAGE_END}{tail}")


def _list_host(results: Results, model: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    header = (
        "loop",
        "mode",
        "batch",
        "steps",
        "host us a step, mean",
        "median",
        "model's call",
        "monitor's calls",
        "a log of the Trainer, us",
    )
    return header, [
        (
            row["loop"],
            row["mode"],
            row["what"],
            str(row["steps"]),
            format_pair(row, "host_us_mean", "host_us_se"),
            *(format_number(row[key]) for key in ("host_us_median", "call_us_mean", "log_us_mean")),
            format_number(row.get("trainer_log_us_mean")),
        )
        for row in find_rows(results, "host", model)
    ]


def _list_arms(results: Results, model: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    header = (
        "arm", "steps", "step ms", "beyond none, us", "beyond none, %", "CPU us a step of its threads",
        f"% over {RUN_STEPS:,} steps", "goal, %",
    )  # fmt: skip
    rows = [
        (
            row["arm"],
            str(row["steps"]),
            format_number(row["step_us_mean"] / 1e3, 5),
            format_pair(row, "difference_us", "difference_se_us"),
            format_pair(row, "difference_percent", "difference_se_percent"),
            format_number(row["worker_cpu_us_per_step"] + row["sink_cpu_us_per_step"]) if row["arm"] in MODES else "–",
            format_number(find_share_percent(results, model, row["arm"])) if row["arm"] in MODES else "–",
            format_number(PROMISED_PERCENT.get(row["arm"])),
        )
        for row in find_rows(results, "arms", model)
    ]
    share = find_share_percent(results, model, "profiler")
    if share is not None:
        rows.append(("profiler", *["–"] * 5, format_number(share), format_number(PROMISED_PERCENT["profiler"])))
    return header, rows


def _list_measured(results: Results, model: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    header = ("mode", "measured by", "first three steps, ms more", "a measured step, ms more", "ratio to a plain one")
    return header, [
        (
            row["mode"],
            row["source"],
            ", ".join(format_number(each) for each in row["first_steps_extra_ms"]),
            format_pair(row, "extra_ms", "extra_se_ms"),
            format_number(row["ratio"], 4),
        )
        for row in find_rows(results, "measured", model)
    ]
