"""Every flag of the examples turned: configs that HF runs and the spec miscounts are found.

    python -m lab.flags [TYPE …] [--jobs N]

A spec may refuse a config in words; it must not count it wrongly. Cases that HF itself cannot run prove nothing and are
left out. Exit code 1 when a count differs.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from flopcalc.base.data import list_data_files
from flopcalc.base.errors import FlopcalcError
from lab.truth import make_parser, report

# Flags that say what a call returns or caches, not what the model is.
IGNORED = {"use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "is_encoder_decoder"}
LARGEST = 50_000_000  # parameters; an inner config that the example leaves to its defaults may be a whole model


def list_flips(config: dict[str, Any], filled: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with one flag turned, one more layer, or one kind of layer exchanged; inner configs too."""
    for where in ((), *((key,) for key, value in filled.items() if isinstance(value, dict))):
        table = filled[where[0]] if where else filled
        for key, value in table.items():
            changed: Any = None
            if isinstance(value, bool) and key not in IGNORED:
                changed = not value
            elif key in ("num_hidden_layers", "n_layer", "num_layers", "depth") and isinstance(value, int):
                changed = value + 1
            elif key == "layer_types" and isinstance(value, list) and len(set(value)) > 1:
                changed = value[1:] + value[:1]
            if changed is None:
                continue
            new = copy.deepcopy(config)
            inner = new.setdefault(where[0], {}) if where else new
            inner[key] = changed
            yield ".".join((*where, f"{key} = {changed}")), new


def find_miscounted(name: str) -> list[str]:
    """The changed configs of one type that are counted wrongly; a line for each."""
    from flopcalc.measure.hf.examples import find_example, list_cases, make_estimator
    from flopcalc.measure.hf.models import make_config
    from flopcalc.measure.hf.verify import prepare, verify

    prepare()
    example = find_example(name)
    lines = []
    for number, config in enumerate(example.configs):
        architecture = example.choose_class(make_estimator(example, config).spec.architecture)
        filled = make_config(config, architecture).to_dict()
        cases = list(list_cases(example, config))
        picked = [cases[0][0], *[w for w, _ in cases if w.get("images") or w.get("clips")][:1]]
        for what, changed in list_flips(config, filled):
            try:
                if make_estimator(example, changed).parameters()["total"] > LARGEST:
                    continue
            except FlopcalcError:
                continue  # refused in words
            for workload in picked:
                try:
                    verdict = verify(changed, workload, {}, example=example)
                except FlopcalcError:
                    continue  # refused in words
                except Exception:  # HF cannot run it
                    continue
                if not verdict.is_equal:
                    shown = dict(list(verdict.different.items())[:2]) or verdict.parameters
                    lines.append(f"{name}/{'abcdefgh'[number]} {what} {workload}: {shown}")
                    break
    return lines


def main() -> int:
    parser = make_parser("flags", __doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    known = list_data_files("examples")
    unknown = set(options.types) - set(known)
    if unknown:
        raise FlopcalcError(f"no example of {', '.join(sorted(unknown))}")
    failed = False
    names = options.types or list(known)
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, lines in zip(names, pool.map(find_miscounted, names), strict=True):
            failed |= bool(lines)
            print(f"{name}: {len(lines)} differ", *lines, sep="\n  ", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(report(main))
