"""Which heavy cases a change concerns: changed files in, the cases that should run out, most relevant first."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from places import ROOT

TYPES = "all cases of the type that the file is named after, and of every type that builds on it"
ENGINE = "one type per distinct set of spec keys; and the cases without a type in the folder that mirrors the file's"
MIRROR = "the cases of the test folder that mirrors the file's"
ITSELF = "the cases of the file"
PREDICTION = ("tests/hardware", "tests/prediction", "tests/planning")
# What a changed file runs: one of the words above, or the cases of these folders. The first pattern that fits holds;
# one that ends in / is a folder with all that is in it. A file that fits none runs nothing heavy.
RULES: tuple[tuple[str, str | tuple[str, ...]], ...] = (
    ("model_specs/specs/", TYPES),
    ("model_specs/aliases/", TYPES),
    ("model_specs/examples/", TYPES),
    ("model_specs/presets/", TYPES),
    ("model_specs/operators/", TYPES),
    ("tests/truth/types/", TYPES),
    ("tests/truth/clipping/", TYPES),
    ("model_specs/calibration/", PREDICTION),
    ("model_specs/predictors/", PREDICTION),
    ("model_specs/systems/", PREDICTION),
    ("model_specs/tiles/", PREDICTION),
    ("model_specs/devices.toml", PREDICTION),
    ("model_specs/interconnects.toml", PREDICTION),
    ("model_specs/prices.toml", PREDICTION),
    ("model_specs/", ENGINE),
    ("flopcalc/*.py", ENGINE),
    ("flopcalc/base/", ENGINE),
    ("flopcalc/core/", ENGINE),
    ("flopcalc/hardware/", ENGINE),
    ("flopcalc/measure/counters/", ENGINE),
    ("flopcalc/measure/hf/", ENGINE),
    ("flopcalc/measure/trace/", ENGINE),
    ("flopcalc/", MIRROR),
    ("tests/helpers/", ENGINE),
    ("constraints.txt", ENGINE),  # other releases of torch and transformers execute something else
    ("tests/test_*.py", ITSELF),
    ("tests/**/test_*.py", ITSELF),
    ("lab/", ("tests/lab",)),
    ("benchmarks/", ("tests/prediction", "tests/planning", "tests/measure/sweep", "tests/integrations")),
    ("notebooks/", ("tests/measure/sweep/test_sweep_notebook.py", "tests/measure/test_guide_notebooks.py")),
    ("lab/calibration.ipynb", ("tests/measure/test_notebooks.py",)),
)
CHOOSERS = tuple(
    f"tests/helpers/{name}.py" for name in ("journal", "relevance", "tiers")
)  # they choose, and run nothing
TEXTS = ("docs/", "changelog.d/", "README", "CHANGELOG")
LAST_RUN = re.compile(r"^\| [^|]+ \| `([0-9a-f]{7,40})` \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
_NAMED_BY = ("extends", "use", "body", "like")  # keys of a spec or an alias that name another


# --- what changed -----------------------------------------------------------------------------------------------------
def read_base(page: str) -> str | None:
    """The commit of the last full run that docs/proof.md names."""
    row = LAST_RUN.search(page)
    return row[1] if row else None


def ask_git(root: Path, *words: str) -> str | None:
    """What git prints; None where there is no git, no checkout, or no such commit."""
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def find_changes(root: Path, base: str | None) -> list[str] | None:
    """Files that differ from the base commit, untracked ones too; None if that cannot be known."""
    changed = ask_git(root, "diff", "--name-only", "--no-renames", "-z", f"{base}^{{commit}}") if base else None
    untracked = ask_git(root, "ls-files", "--others", "--exclude-standard", "-z")
    if changed is None or untracked is None:
        return None
    return sorted(name for name in set((changed + untracked).split("\0")) if name)


# --- model types ------------------------------------------------------------------------------------------------------
@cache
def list_files() -> dict[str, list[Path]]:
    """Name of a type -> the files that describe it: its spec or alias, and its example."""
    found: dict[str, list[Path]] = {}
    for folder in ("specs", "aliases", "examples"):
        for path in sorted((ROOT / "model_specs" / folder).rglob("*.toml")):
            found.setdefault(path.stem, []).append(path)
    return found


@cache
def read_table(path: Path) -> dict[str, Any]:
    """A data file; one that is broken says nothing here, since its own tests report it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def list_model_types(value: Any) -> Iterator[str]:
    """Every model type in a config and in those inside it, with its backbone; also classes of a pipeline's parts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str) and str(key).endswith(("model_type", "_class_name")):
                yield from (inner, f"{inner}_backbone")
            yield from list_model_types(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from list_model_types(inner)


@cache
def find_parents(name: str) -> frozenset[str]:
    """The types that this one builds on: through `extends`, `use`, `body`, `like`, and the configs inside its own."""

    def list_named(value: Any) -> Iterator[str]:
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from list_named(inner)
        if isinstance(value, dict):
            yield from (str(value[key]) for key in _NAMED_BY if key in value)

    tables = [read_table(path) for path in list_files()[name]]
    return frozenset({*list_named(tables), *list_model_types(tables)} & list_files().keys() - {name})


def find_dependents(names: Iterable[str]) -> dict[str, int]:
    """These types and all that build on them, with the number of steps from the nearest."""
    steps = dict.fromkeys(names, 0)
    front = list(steps)
    while front:
        found = [name for name in list_files() if name not in steps and find_parents(name) & set(front)]
        steps |= dict.fromkeys(found, steps[front[0]] + 1)
        front = found
    return steps


@cache
def list_keys(name: str) -> frozenset[str]:
    """The kinds of op and the keys that a type's spec uses, merged with what it extends, and those of its towers."""
    from flopcalc.base.errors import FlopcalcError
    from flopcalc.core.spec.spec import find_spec

    try:
        spec = find_spec(name)
    except FlopcalcError:  # its own tests say what is wrong
        spec = None
    if spec is None:
        return frozenset()
    tables = {"vision": spec.vision, "audio": spec.audio, "latents": spec.latents, "pixels": spec.vision.get("pixels")}
    keys = {f"{label}.{key}" for label, table in tables.items() if isinstance(table, dict) for key in table}
    keys |= {f"stack.{key}" for stack in spec.stacks for key in stack}
    keys |= {f"{op['op']}.{key}" for op in _list_ops([*spec.blocks.values(), *spec.stacks]) for key in op}
    towers = {str(stack.get("use")) for stack in spec.stacks} & list_files().keys() - {name}
    return frozenset(keys).union(*map(list_keys, towers))


def _list_ops(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and "op" in value:
        yield value
    for inner in value.get("ops", ()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _list_ops(inner)


@cache
def list_engine_types() -> dict[str, int]:
    """One type per distinct set of spec keys, with its place: first the few that together use every key."""
    firsts: dict[frozenset[str], str] = {}
    for name, paths in list_files().items():
        if any(path.parent.name in ("examples", "diffusers") for path in paths):
            firsts.setdefault(list_keys(name), name)
    order: list[str] = []
    uncovered = set().union(*firsts)
    rest = dict(firsts)
    while uncovered:
        keys = max(rest, key=lambda keys: (len(keys & uncovered), -len(keys)))
        order.append(rest.pop(keys))
        uncovered -= keys
    return {name: place for place, name in enumerate([*order, *rest.values()])}


# --- cases ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A heavy case: its node id, and the types or presets that it is about."""

    node_id: str
    names: frozenset[str] = frozenset()

    @property
    def file(self) -> str:
        return self.node_id.partition("::")[0]

    @property
    def function(self) -> str:
        return self.node_id.partition("[")[0]


def find_names(params: dict[str, Any], label: str = "") -> frozenset[str]:
    """The types and presets that a case's parameters name: by themselves, as a word, or as the model_type of a config.

    `label` is the case's id, which is read if no parameter names one.
    """
    words: set[str] = set()
    for value in params.values():
        words |= {value, *value.split()} if isinstance(value, str) else set(list_model_types(value))
    found = _known(words) or _known(label.split("-"))
    for preset in found - list_files().keys():
        found |= _known(list_model_types(_read_preset(preset)))
    return frozenset(found)


def _known(words: Iterable[str]) -> set[str]:
    return {word for word in words if word in list_files() or _read_preset(word)}


def _read_preset(name: str) -> dict[str, Any]:
    if not re.fullmatch(r"\w[\w.+-]*", name):
        return {}
    table = read_table(ROOT / "model_specs" / "presets" / f"{name}.toml")
    return _read_preset(table["alias"]) if "alias" in table else table


def mirror(path: str) -> str:
    """The test folder that mirrors the folder of a file below flopcalc/: the deepest that exists; '' if none does."""
    folder = PurePosixPath(path).parent
    while folder.parts and not (ROOT / "tests" / folder.relative_to("flopcalc")).is_dir():
        folder = folder.parent
    found = folder.relative_to("flopcalc").as_posix() if folder.parts else "."
    return "" if found == "." else f"tests/{found}"


def find_rule(path: str) -> str | tuple[str, ...] | None:
    """What a changed file runs."""
    for pattern, what in RULES:
        if path.startswith(pattern) if pattern.endswith("/") else _fits(path, pattern):
            return what
    return None


def _fits(path: str, pattern: str) -> bool:
    folder, _, name = pattern.rpartition("/")
    parent = PurePosixPath(path).parent.as_posix()
    is_there = parent.startswith(f"{folder[:-3]}/") if folder.endswith("/**") else parent == (folder or ".")
    return is_there and PurePosixPath(path).match(name)


def sort_relevant(cases: Iterable[Case], changed: Iterable[str] | None) -> list[Case]:
    """The cases that the changed files concern, most relevant first; without a list of files, those of the engine.

    First changed types and what builds on them, the nearest first; then the engine's types, one case of each function
    before the second; then test files and folders, likewise.
    """
    files = [(path, find_rule(path)) for path in changed or ()]
    types = find_dependents(PurePosixPath(path).stem for path, what in files if what == TYPES)
    engine = list_engine_types() if changed is None or any(what == ENGINE for _, what in files) else {}
    places = {path for path, what in files if what == ITSELF}
    places |= {mirror(path) for path, what in files if what == MIRROR}
    places |= {place for _, what in files if isinstance(what, tuple) for place in what}
    untyped = {mirror(path) for path, what in files if what == ENGINE and path.startswith("flopcalc/")}

    seen: Counter[tuple[str, frozenset[str]]] = Counter()
    ranked: list[tuple[tuple[int, int, int, str], Case]] = []
    for case in sorted(cases, key=lambda case: case.node_id):
        if steps := [types[name] for name in case.names if name in types]:
            level, place = 0, min(steps)
        elif order := [engine[name] for name in case.names if name in engine]:
            level, place = 1, min(order)
        elif _lies_in(case.file, places) or (not case.names and _lies_in(case.file, untyped)):
            level, place = 2, 0
        else:
            continue
        kind = (case.function, case.names if level == 1 else frozenset())
        nth = seen[kind] if level else 0
        seen[kind] += 1
        ranked.append(((level, *((nth, place) if level else (place, nth)), case.node_id), case))
    return [case for _, case in sorted(ranked, key=lambda pair: pair[0])]


def find_unconcerned(node_ids: Iterable[str], changed: Iterable[str]) -> set[str]:
    """The heavy cases that these changes cannot concern; none where they may concern the engine.

    Only files whose reach is known free cases: those of types, of tests and what helps them, of the lab, of the
    benchmarks, and texts that no test runs.
    """
    files = [
        (path, find_rule(path))
        for path in changed
        if path not in CHOOSERS and not path.startswith(TEXTS) and not path.endswith(".md")
    ]
    places: set[str] = set()
    for path, what in files:
        if path.startswith(("tests/helpers/", "benchmarks/")) and path.endswith(".py"):
            places |= find_users(PurePosixPath(path).stem)
        elif path.startswith("lab/"):
            places.add("tests/lab")
        elif what == ITSELF:
            places.add(path)
        elif what != TYPES:
            return set()
    types = find_dependents(PurePosixPath(path).stem for path, what in files if what == TYPES)
    return {
        node_id
        for node_id in node_ids
        if not _lies_in(node_id.partition("::")[0], places) and not any(name in node_id for name in types)
    }


def find_users(script: str) -> set[str]:
    """Test files that import or name a script, also through a helper; all tests if the root's conftest does."""
    imports = re.compile(rf"^\s*(?:from|import) {script}\b|[\"'/]{script}(?:\.py)?[\"']", re.MULTILINE)
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path.stem != script and imports.search(path.read_text(encoding="utf-8")):
            if path.parent.name == "helpers":
                found |= find_users(path.stem)
            else:
                found.add(path.relative_to(ROOT).as_posix().removesuffix("/conftest.py"))
    return found


def _lies_in(file: str, places: set[str]) -> bool:
    return any(place and (file == place or file.startswith(f"{place}/")) for place in places)


def cap(cases: Iterable[Case], seconds_of: dict[str, float], most_s: float, usual_s: float) -> list[Case]:
    """The first cases that together take no longer than `most_s`; one without a recorded time takes the usual."""
    taken, sum_s = [], 0.0
    for case in cases:
        duration_s = seconds_of.get(case.function, usual_s)
        if sum_s + duration_s <= most_s:
            sum_s += duration_s
            taken.append(case)
    return taken
