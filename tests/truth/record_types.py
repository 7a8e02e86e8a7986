"""Model types go in; tests/truth/types/<type>.json, what HF's tiny example models execute, comes out (or is compared).

python tests/truth/record_types.py [TYPE …] [--check | --missing]

All of model_specs/examples without names, in parallel; --missing leaves out those whose every case is recorded already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]

from flopcalc.data import list_data_files, load_toml  # noqa: E402

TYPES = HERE / "types"
SCHEMA = 1
WITH = ("torch", "transformers", "peft")


def record_case(example: Any, config: dict[str, Any], case: Any) -> dict[str, Any]:
    """One trace: totals, parameters, and a row per module."""
    from flopcalc.measure.hf.verify import trace

    workload, recipe = case
    where = f"{example.model_type} {json.dumps(workload)} {json.dumps(recipe)}"
    try:
        found = trace(config, workload, recipe, example)
    except Exception as error:
        raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
    if found.counted.not_counted:
        raise RuntimeError(f"{where}: operators met and not counted: {found.counted.not_counted}")
    rows = {path: list(row) for path, row in found.counted.rows.items() if any(row)}
    return {"workload": workload, "recipe": recipe, "total": found.total, "trainable": found.trainable, "rows": rows}


def record(name: str, only: int | None = None) -> dict[str, Any]:
    """Every case of every tiny config of a type; `only`: so many of the first cases of the first config."""
    from flopcalc.measure.hf.examples import find_example, list_cases

    example = find_example(name)
    configs = []
    for config in example.configs if only is None else example.configs[:1]:
        cases = list(list_cases(example, config))[:only]
        configs.append({"config": config, "cases": [record_case(example, config, case) for case in cases]})
    made_with = {library: version(library) for library in WITH}
    return {"schema": SCHEMA, "made_with": made_with, "architecture": example.architecture, "configs": configs}


def dump(truth: dict[str, Any]) -> str:
    """JSON with the paths of a config's modules once, and one case a line."""
    configs = []
    for entry in truth["configs"]:
        paths = list(dict.fromkeys(path for case in entry["cases"] for path in case["rows"]))
        number = {path: i for i, path in enumerate(paths)}
        lines = []
        for case in entry["cases"]:
            rows = [[number[path], *_trim(row)] for path, row in case["rows"].items()]
            lines.append("    " + json.dumps({**case, "rows": rows}, separators=(",", ":")))
        body = ",\n".join(lines)
        head = f'   "config": {json.dumps(entry["config"])},\n   "paths": {json.dumps(paths)}'
        configs.append(f'  {{\n{head},\n   "cases": [\n{body}\n   ]\n  }}')
    start = {key: value for key, value in truth.items() if key != "configs"}
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in start.items())
    return f'{{\n{head},\n "configs": [\n' + ",\n".join(configs) + "\n ]\n}\n"


def _trim(row: list[int]) -> list[int]:
    while row and not row[-1]:
        row = row[:-1]
    return row


def load(path: Path) -> dict[str, Any]:
    """A recorded file, its rows by path again."""
    truth: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for entry in truth["configs"]:
        paths = entry.pop("paths")
        for case in entry["cases"]:
            case["rows"] = {paths[i]: [*row, 0, 0, 0][:3] for i, *row in case["rows"]}
    return truth


def find_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What `new` says otherwise than `old`, which may hold more cases."""
    found = []
    for number, entry in enumerate(new["configs"]):
        before = old["configs"][number] if number < len(old["configs"]) else {"config": None, "cases": []}
        if before["config"] != entry["config"]:
            found.append(f"config {number} was never recorded so")
            continue
        for i, case in enumerate(entry["cases"]):
            told = before["cases"][i] if i < len(before["cases"]) else None
            if told != case:
                found.append(f"config {number}, {case['workload']} {case['recipe']}: {_describe(told, case)}")
    return found


def _describe(told: dict[str, Any] | None, case: dict[str, Any]) -> str:
    if told is None or told["workload"] != case["workload"] or told["recipe"] != case["recipe"]:
        return "was never recorded"
    changed = [path for path in {**told["rows"], **case["rows"]} if told["rows"].get(path) != case["rows"].get(path)]
    if changed:
        return f"{changed[0]}: recorded {told['rows'].get(changed[0])}, now {case['rows'].get(changed[0])}"
    return f"parameters: recorded {told['total']}, {told['trainable']}, now {case['total']}, {case['trainable']}"


def is_recorded(name: str) -> bool:
    """Whether exactly the cases of a type's example are recorded, with the installed libraries."""
    from flopcalc.measure.hf.examples import find_example, list_cases

    path = TYPES / f"{name}.json"
    if not path.exists():
        return False
    example, truth = find_example(name), load(path)
    told = [
        (entry["config"], [(case["workload"], case["recipe"]) for case in entry["cases"]]) for entry in truth["configs"]
    ]
    wanted = [(config, list(list_cases(example, config))) for config in example.configs]
    same = json.dumps(told) == json.dumps(wanted) and truth["architecture"] == example.architecture
    return same and truth["made_with"] == {library: version(library) for library in WITH}


def run(name: str, check: bool) -> tuple[str, bool]:
    """Record or check one type; the line to print, and whether it failed."""
    start, path = time.perf_counter(), TYPES / f"{name}.json"
    needed = load_toml(list_data_files("examples")[name]).get("needs")
    if needed and find_spec(needed) is None:
        return f"{name}: left alone, for it needs {needed}", False
    try:
        truth = json.loads(json.dumps(record(name)))
        if check:
            found = find_differences(load(path), truth) if path.exists() else ["was never recorded"]
            if found:
                return "\n".join(f"{name}: {line}" for line in found), True
        else:
            part = path.with_suffix(".part")
            part.write_text(dump(truth), encoding="utf-8")
            os.replace(part, path)
    except Exception as error:
        return f"{name}: {error if isinstance(error, RuntimeError) else traceback.format_exc()}", True
    cases = sum(len(entry["cases"]) for entry in truth["configs"])
    return f"{name}: {cases} cases, {time.perf_counter() - start:.1f} s", False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="all without")
    parser.add_argument("--check", action="store_true", help="re-make and compare; exit 1 when a number differs")
    parser.add_argument("--missing", action="store_true", help="only what is not recorded, or otherwise")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    known = list_data_files("examples")
    unknown = set(options.types) - set(known)
    if unknown:
        parser.error(f"no example of {', '.join(sorted(unknown))}")
    TYPES.mkdir(exist_ok=True)
    failed = False
    from flopcalc.measure.hf.verify import prepare

    with ProcessPoolExecutor(options.jobs, initializer=prepare) as pool:
        names = [name for name in options.types or known if not (options.missing and is_recorded(name))]
        for line, has_failed in pool.map(partial(run, check=options.check), names):
            failed |= has_failed
            print(line, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
