"""What HF's models execute, case by case: recorded in a folder, read from it without torch, made again and compared.

    python -m lab.truth [TYPE …] [--check | --missing] [--truth DIR] [--jobs N]

DIR/types/TYPE.json holds the cases of the type's example (model_specs/examples). Under `more` a file may hold other
cases; each is recorded again as it stands there. To add one, add a line with its workload and its recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flopcalc.base.data import find_data_dir, list_data_files, load_toml
from flopcalc.base.errors import FlopcalcError

if TYPE_CHECKING:
    from flopcalc.measure.hf.examples import Example

__all__ = ["Case", "Entry", "Truth", "find_differences", "find_folder", "list_types", "load", "record"]

Json = dict[str, Any]
Row = tuple[int, int, int]  # forward, backward, recompute
SCHEMA = 1
FOLDER = "types"
MADE_WITH = ("torch", "transformers", "peft")


class Case(NamedTuple):
    """One step of a model: its parameters, and what every module executes."""

    workload: Json
    recipe: Json
    total: int = 0  # parameters
    trainable: int = 0
    rows: Mapping[str, Row] = {}
    sums: Row | None = None  # of the whole step, where the rows of most layers are left out

    @property
    def flops(self) -> Row:
        """Of the whole step."""
        if self.sums is not None:
            return self.sums
        return _fill([sum(column) for column in zip(*self.rows.values(), strict=True)])


class Entry(NamedTuple):
    """One config with its cases: those of the type's example, and more."""

    config: Json
    cases: tuple[Case, ...] = ()
    more: tuple[Case, ...] = ()
    preset: str = ""  # whose size it has; it is run on meta, and rows of the first two and the last layers are kept

    @property
    def all_cases(self) -> tuple[Case, ...]:
        return self.cases + self.more


class Truth(NamedTuple):
    """What is recorded of one model type."""

    architecture: str | None  # HF class, where it is not the spec's own
    entries: tuple[Entry, ...]
    made_with: Mapping[str, str] = {}

    @property
    def cases(self) -> list[Case]:
        return [case for entry in self.entries for case in entry.all_cases]


# --- Files --------------------------------------------------------------------------------------------------


def find_folder(given: str | None = None) -> Path:
    """The folder of truth: the one given, else the checkout's."""
    if given is not None:
        return Path(given)
    folder = Path(find_data_dir()).parent / "tests" / "truth"
    if not folder.is_dir():
        raise FlopcalcError("only a checkout has a folder tests/truth: give --truth DIR")
    return folder


def list_types(folder: Path | None = None) -> list[str]:
    """The model types that are recorded in a folder of truth."""
    return sorted(path.stem for path in ((folder or find_folder()) / FOLDER).glob("*.json"))


def load(name: str, folder: Path | None = None) -> Truth:
    """What is recorded of a model type."""
    path = (folder or find_folder()) / FOLDER / f"{name}.json"
    return parse(path.read_text(encoding="utf-8"))


def parse(text: str) -> Truth:
    """The text of a file, its rows by path."""
    tables = json.loads(text)
    entries = []
    for entry in tables["configs"]:
        read = partial(_read_case, paths=entry["paths"])
        cases, more = (tuple(map(read, entry.get(key, ()))) for key in ("cases", "more"))
        entries.append(Entry(entry["config"], cases, more, entry.get("preset", "")))
    return Truth(tables["architecture"], tuple(entries), tables["made_with"])


def _read_case(case: Json, paths: list[str]) -> Case:
    rows = {paths[number]: _fill(row) for number, *row in case.get("rows", ())}
    sums = _fill(case["sums"]) if "sums" in case else None
    return Case(case["workload"], case["recipe"], case.get("total", 0), case.get("trainable", 0), rows, sums)


def _fill(row: Sequence[int]) -> Row:
    """A row as it was before its last zeros were left out."""
    forward, backward, recompute = [*row, 0, 0, 0][:3]
    return forward, backward, recompute


def dump(truth: Truth) -> str:
    """The text of a file: the paths of a config's modules once, and one case a line."""
    configs = []
    for entry in truth.entries:
        paths = list(dict.fromkeys(path for case in entry.all_cases for path in case.rows))
        numbers = {path: number for number, path in enumerate(paths)}
        head = {"preset": entry.preset} if entry.preset else {}
        lines = [f'   "{key}": {json.dumps(value)}' for key, value in {**head, "config": entry.config}.items()]
        lines.append(f'   "paths": {json.dumps(paths)}')
        for key, cases in (("cases", entry.cases), ("more", entry.more)):
            if cases or key == "cases":
                body = ",\n".join(f"    {_write_case(case, numbers)}" for case in cases)
                lines.append(f'   "{key}": [\n{body}\n   ]' if cases else f'   "{key}": []')
        configs.append("  {\n" + ",\n".join(lines) + "\n  }")
    start = {"schema": SCHEMA, "made_with": truth.made_with, "architecture": truth.architecture}
    head_lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in start.items())
    return f'{{\n{head_lines},\n "configs": [\n' + ",\n".join(configs) + "\n ]\n}\n"


def _write_case(case: Case, numbers: dict[str, int]) -> str:
    table: Json = {"workload": case.workload, "recipe": case.recipe, "total": case.total, "trainable": case.trainable}
    if case.sums is not None:
        table["sums"] = _trim(case.sums)
    table["rows"] = [[numbers[path], *_trim(row)] for path, row in case.rows.items()]
    return json.dumps(table, separators=(",", ":"))


def _trim(row: Row) -> list[int]:
    trimmed = list(row)
    while trimmed and not trimmed[-1]:
        trimmed.pop()
    return trimmed


def write(path: Path, text: str) -> None:
    """The whole file or nothing of it."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


# --- Recording ----------------------------------------------------------------------------------------------


def list_entries(example: Example, old: Truth | None) -> Iterator[Entry]:
    """The cases to record, without numbers: the example's, and what the old record holds beyond them."""
    from flopcalc.measure.hf.examples import list_cases

    others = list(old.entries) if old is not None else []
    for config in example.configs:
        same = next((entry for entry in others if entry.config == config), None)
        if same is not None:
            others.remove(same)
        cases = tuple(Case(workload, recipe) for workload, recipe in list_cases(example, config))
        yield Entry(config, cases, same.more if same is not None else ())
    for entry in others:
        if entry.more:
            yield entry._replace(cases=())


def record(name: str, old: Truth | None = None, limit: int | None = None) -> Truth:
    """Every case of a type, traced now; `limit`: so many of the first cases of the first config."""
    from flopcalc.measure.hf.examples import find_example

    example = find_example(name)
    entries = list(list_entries(example, old))
    if limit is not None:
        entries = [entries[0]._replace(cases=entries[0].cases[:limit], more=())]
    found = tuple(record_entry(example, entry) for entry in entries)
    return Truth(example.architecture, found, find_versions(MADE_WITH))


def find_versions(libraries: tuple[str, ...]) -> dict[str, str]:
    return {library: version(library) for library in libraries}


def record_entry(example: Example, entry: Entry) -> Entry:
    """The cases of one config, traced now; its model is built once, and each case runs on a copy."""
    from copy import deepcopy

    import torch

    from flopcalc.measure.hf.verify import build, trace

    device = "meta" if entry.preset else "cpu"
    model = build(entry.config, example, device)

    def run(case: Case) -> Case:
        where = f"{entry.preset or example.model_type} {json.dumps(case.workload)} {json.dumps(case.recipe)}"
        torch.manual_seed(0)  # a router that adds noise sends the same rows to the same experts, whatever ran before
        try:
            found = trace(entry.config, case.workload, case.recipe, example, device, deepcopy(model))
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        counted = found.counted
        if counted.not_counted:
            raise RuntimeError(f"{where}: operators met and not counted: {counted.not_counted}")
        rows = {path: row for path, row in counted.rows.items() if any(row)}
        sums = (counted.forward, counted.backward, counted.recompute) if entry.preset else None
        rows = keep_layers(rows) if entry.preset else rows
        return case._replace(total=found.total, trainable=found.trainable, rows=rows, sums=sums)

    return entry._replace(cases=tuple(map(run, entry.cases)), more=tuple(map(run, entry.more)))


_LAYER = re.compile(r"^(.*?\.(?:layers|h|blocks))\.(\d+)(?=\.|$)")


def keep_layers(rows: dict[str, Row]) -> dict[str, Row]:
    """The rows outside of stacks, and of every stack those of the first two layers and the last."""
    last: dict[str, int] = {}
    for path in rows:
        if match := _LAYER.match(path):
            last[match[1]] = max(last.get(match[1], 0), int(match[2]))
    kept = {}
    for path, row in rows.items():
        match = _LAYER.match(path)
        if match is None or int(match[2]) in (0, 1, last[match[1]]):
            kept[path] = row
    return kept


# --- Comparing ----------------------------------------------------------------------------------------------


def find_differences(old: Truth, new: Truth, is_part: bool = False) -> list[str]:
    """Every case that two records hold differently; of a part of a record, only the cases it has."""
    found = []
    before, after = _list_by_key(old), _list_by_key(new)
    for key, case in after.items():
        if before.get(key) != case:
            found.append(f"{' '.join(key)}: {_describe(before.get(key), case)}")
    if not is_part:
        found += [f"{' '.join(key)}: is recorded, and no longer asked for" for key in before if key not in after]
        if old.architecture != new.architecture:
            found.append(f"architecture: recorded {old.architecture}, now {new.architecture}")
    return found


def _list_by_key(truth: Truth) -> dict[tuple[str, str, str], Case]:
    return {
        (entry.preset or json.dumps(entry.config), json.dumps(case.workload), json.dumps(case.recipe)): case
        for entry in truth.entries
        for case in entry.all_cases
    }


def _describe(old: Case | None, new: Case) -> str:
    if old is None:
        return "was never recorded"
    paths = dict.fromkeys((*old.rows, *new.rows))
    rows = [
        f"{path} recorded {old.rows.get(path)}, now {new.rows.get(path)}"
        for path in paths
        if old.rows.get(path) != new.rows.get(path)
    ]
    for what in ("total", "trainable", "sums"):
        if getattr(old, what) != getattr(new, what):
            rows.append(f"{what} recorded {getattr(old, what)}, now {getattr(new, what)}")
    return "; ".join(rows)


def is_recorded(name: str, folder: Path) -> bool:
    """Whether exactly the cases of a type's example are recorded, with the installed libraries."""
    from flopcalc.measure.hf.examples import find_example

    if name not in list_types(folder):
        return False
    example, old = find_example(name), load(name, folder)

    def list_asked(entries: Iterator[Entry]) -> list[Any]:
        return [(each.config, [(case.workload, case.recipe) for case in each.all_cases]) for each in entries]

    same = list_asked(iter(old.entries)) == list_asked(list_entries(example, old))
    return same and old.architecture == example.architecture and old.made_with == find_versions(MADE_WITH)


# --- Command ------------------------------------------------------------------------------------------------


def run(name: str, folder: Path, check: bool) -> tuple[str, bool]:
    """Record or check one type; the lines to print, and whether it failed."""
    start = time.perf_counter()
    needed = load_toml(list_data_files("examples")[name]).get("needs")
    if needed and find_spec(needed) is None:
        return f"{name}: left out, {needed} is not installed", False
    try:
        old = load(name, folder) if name in list_types(folder) else None
        if check and old is None:
            return f"{name}: was never recorded", True
        truth = record(name, old)
        if check and old is not None:
            found = find_differences(old, truth)
            if found:
                return "\n".join(f"{name}: {line}" for line in found), True
        else:
            write(folder / FOLDER / f"{name}.json", dump(truth))
    except Exception as error:
        return f"{name}: {error if isinstance(error, RuntimeError) else traceback.format_exc()}", True
    return f"{name}: {len(truth.cases)} cases, {time.perf_counter() - start:.1f} s", False


def make_parser(name: str, description: str | None, types: str = "all without") -> argparse.ArgumentParser:
    """The parser of a module that is run with `python -m`; it takes model types."""
    parser = argparse.ArgumentParser(
        f"python -m lab.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("types", nargs="*", help=types)
    return parser


def make_recorder_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The same with what every recorder of truth takes."""
    parser = make_parser(name, description)
    parser.add_argument("--check", action="store_true", help="record again and compare; exit 1 if a number differs")
    parser.add_argument("--truth", metavar="DIR", help="the folder of truth; default: tests/truth of the checkout")
    return parser


def report(main: Callable[[], int]) -> int:
    """The exit code of a command; its errors are one line."""
    try:
        return main()
    except FlopcalcError as error:
        print(f"flopcalc: {error}", file=sys.stderr)
        return 2


def main() -> int:
    parser = make_recorder_parser("truth", __doc__)
    parser.add_argument("--missing", action="store_true", help="only what is not recorded, or otherwise")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    folder, known = find_folder(options.truth), list_data_files("examples")
    unknown = set(options.types) - set(known)
    if unknown:
        raise FlopcalcError(f"no example of {', '.join(sorted(unknown))}")
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    from flopcalc.measure.hf.verify import prepare

    names = [name for name in options.types or known if not (options.missing and is_recorded(name, folder))]
    failed = False
    with ProcessPoolExecutor(options.jobs, initializer=prepare) as pool:
        for line, has_failed in pool.map(partial(run, folder=folder, check=options.check), names):
            failed |= has_failed
            print(line, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(report(main))
