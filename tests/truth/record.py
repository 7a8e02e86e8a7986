"""Families to run go in; tests/truth/<family>.json, what their HF models execute, comes out (or is compared)."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from cases import FAMILIES, Model  # noqa: E402

from flopcalc.measure.hf.models import measure  # noqa: E402

SCHEMA = 1
_LAYER = re.compile(r"^(.*?\.(?:layers|h|blocks))\.(\d+)(?=\.|$)")


def _kept_rows(rows: dict[str, tuple[int, int, int]], published: bool) -> dict[str, list[int]]:
    """All rows; of a published size the first two and the last layer of each stack (the totals stay whole)."""
    last: dict[str, int] = {}
    for path in rows:
        if match := _LAYER.match(path):
            last[match[1]] = max(last.get(match[1], 0), int(match[2]))
    kept = {}
    for path, row in rows.items():
        match = _LAYER.match(path) if published else None
        if match is None or int(match[2]) in (0, 1, last[match[1]]):
            kept[path] = list(row)
    return kept


def record_model(family: str, model: Model) -> dict[str, Any]:
    device = "meta" if model.published else "cpu"
    cases = []
    for workload, recipe in model.cases:
        where = f"{family}/{model.name} {json.dumps(workload)} {json.dumps(recipe)}"
        try:
            counted, total, trainable = measure(model.config, workload, recipe, device=device)
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        if counted.not_counted:
            raise RuntimeError(f"{where}: operators met and not counted: {counted.not_counted}")
        cases.append(
            {
                "workload": workload,
                "recipe": recipe,
                "forward": counted.forward,
                "backward": counted.backward,
                "recompute": counted.recompute,
                "parameters_total": total,
                "parameters_trainable": trainable,
                "rows": _kept_rows(counted.rows, model.published),
            }
        )
    plain = next(c for c in cases if not c["recipe"])
    return {
        "name": model.name,
        "published": model.published,
        "config": model.config,
        "parameters": {"total": plain["parameters_total"]},
        "cases": cases,
    }


def record(family: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "made_with": {name: version(name) for name in ("torch", "transformers", "peft")},
        "models": [record_model(family, model) for model in FAMILIES[family]],
    }


def dump(truth: dict[str, Any]) -> str:
    """JSON with one case a line, so that diffs read well."""
    line = json.dumps
    models = []
    for model in truth["models"]:
        cases = ",\n".join(f"    {line(case)}" for case in model["cases"])
        head = ",\n".join(f"   {line(k)}: {line(v)}" for k, v in model.items() if k != "cases")
        models.append(f'  {{\n{head},\n   "cases": [\n{cases}\n   ]\n  }}')
    body = ",\n".join(models)
    return (
        f'{{\n "schema": {truth["schema"]},\n "made_with": {line(truth["made_with"])},\n "models": [\n{body}\n ]\n}}\n'
    )


def find_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    def flat(truth: dict[str, Any]) -> dict[str, Any]:
        out = {}
        for model in truth["models"]:
            out[f"{model['name']} config"] = model["config"]
            for case in model["cases"]:
                key = f"{model['name']} {json.dumps(case['workload'])} {json.dumps(case['recipe'])}"
                for field, value in case.items():
                    if field == "rows":
                        out.update({f"{key} {path}": row for path, row in value.items()})
                    elif field not in ("workload", "recipe"):
                        out[f"{key} {field}"] = value
        return out

    a, b = flat(old), flat(json.loads(json.dumps(new)))
    return [f"{k}: recorded {a.get(k)}, now {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="*", default=[], help=f"of {', '.join(FAMILIES)}; all without")
    parser.add_argument("--check", action="store_true", help="re-make and compare; exit 1 when a number differs")
    options = parser.parse_args()
    unknown = set(options.family) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    warnings.filterwarnings("ignore")  # peft and torch advise on training, which this is not
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    failed = False
    for family in options.family or FAMILIES:
        start, path = time.perf_counter(), HERE / f"{family}.json"
        truth = record(family)
        if options.check:
            differing = find_differences(json.loads(path.read_text()), truth)
            failed |= bool(differing)
            print(*(f"{family} {line}" for line in differing), sep="\n", end="\n" if differing else "")
        else:
            part = path.with_suffix(".part")
            part.write_text(dump(truth))
            os.replace(part, path)
        cases = sum(len(model["cases"]) for model in truth["models"])
        print(f"{family}: {cases} cases, {time.perf_counter() - start:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
