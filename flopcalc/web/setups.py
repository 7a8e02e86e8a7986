"""The door of the page: its form's JSON becomes a Setup for each view, and lines with the same numbers elsewhere."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from flopcalc.base.data import find_data_file
from flopcalc.base.errors import ConfigError, FlopcalcError, format_nearest, format_value
from flopcalc.base.files import MAX_JSON_BYTES, read_json
from flopcalc.base.spelling import KEYWORDS, LISTS, spell_option
from flopcalc.base.units import parse_size
from flopcalc.base.vocabulary import Convention
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.config import ADAPTER, Source, load_config
from flopcalc.setup.counting import SetupEstimate, bind_setup, count_bound
from flopcalc.setup.fields import FIELDS, GROUPS, Command, Field, list_fields
from flopcalc.setup.setup import BESIDE, Setup, make_setup

_FILE = re.compile(r"(?:[\w.-]+/)?[\w.-]+\.json", re.ASCII)
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.json)", re.ASCII)  # of a preset; nothing else of this machine is read
_ROUTING = re.compile(r"(?:even|spread:.*|[\d\s,]*)", re.ASCII)  # no file: those of this machine are not read
_MOST_FILES = 40
_MOST_BOUND = 8
_ELSEWHERE = ("spec", "download", "trace", "launch", "requests")  # what needs files or code of a machine
_HIDDEN = ("dtype", "gradient_checkpointing", "compile", "top")  # read, and not in the form: another field says it
PLAN_RECOMPUTE = "plan_recompute"  # what a plan tries; a step has one
_KEPT = ("gpus", "batch", "phase")  # said even where the value is the default
_HINTS = {
    "step_time": "500ms",
    "tokens_per_second": "9k",
    "peak": "989T",
    "mfu": "40%",
    "tokens": "15T",
    "image": "1024x768",
    "input_len": "1k",
    "output_len": "256",
}
_SLIDERS = {"batch": (0, 10), "seq": (5, 20)}  # powers of two
_CONTROLS = {
    "device": "device",
    "interconnect": "interconnect",
    "from": "quoted",
    "weights": "format",
    "kv_cache": "format",
}
_VIEWS: dict[str, Command] = {
    "flops": "estimate", "explain": "explain", "translate": "translate", "time": "predict", "memory": "predict",
    "roofline": "predict", "plan": "plan", "serving": "serving",
}  # fmt: skip
_FUNCTIONS = {"estimate": "estimate_flops", "explain": "estimate_flops"}
_bound: dict[Hashable, Estimator] = {}


class Page(NamedTuple):
    """What the form holds: a model (or its files), and fields by name as texts, lists of texts and flags."""

    model: str
    files: tuple[tuple[str, str], ...]
    fields: dict[str, Any]

    def set(self, **fields: Any) -> Page:
        return self._replace(fields={**self.fields, **fields})


def list_page_fields() -> dict[str, Field]:
    """The fields that the page reads: those that a view takes."""
    views = set(_VIEWS.values())
    taken = {name: field for name, field in FIELDS.items() if field.in_doors and views & set(field.commands)}
    return {name: taken[name] for name in taken if name not in _ELSEWHERE} | {PLAN_RECOMPUTE: FIELDS["micro_batch"]}


def describe_form(words: Mapping[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """The form's sections, made from the table: every field with its control, hint, words and slider."""
    sections = []
    for group in GROUPS:
        shown = {name: field for name, field in list_page_fields().items() if name not in _HIDDEN}
        fields = [_describe_field(name, field, words) for name, field in shown.items() if field.group == group]
        if fields:
            sections.append({"name": group, "fields": fields})
    return sections


def _describe_field(name: str, field: Field, words: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    hint = _HINTS.get(name) or (field.default if field.default.isdigit() else field.metavar)
    found: dict[str, Any] = {
        "name": name,
        "kind": _CONTROLS.get(name, "text"),
        "hint": hint,
        "commands": field.commands,
    }
    known = words.get(name) or field.words
    if known and name not in _CONTROLS:
        is_open = name == "phase"  # what a model does where nothing is said depends on it
        first = "" if is_open else field.default
        found |= {"kind": "select", "words": known, "optional": not first, "first": first}
    elif field.kind == "flag":
        found["kind"] = "flag"
    elif field.repeats:
        found["kind"] = "list"
    return {**found, **({"slider": _SLIDERS[name]} if name in _SLIDERS else {})}


def read_page(given: object) -> Page:
    """The page's JSON; unknown keys and values of another kind are errors."""
    if not isinstance(given, Mapping):
        raise FlopcalcError(f"a set-up is an object, not {format_value(given)}")
    known, fields = list_page_fields(), {}
    for name, value in given.items():
        if name in _ELSEWHERE:
            raise FlopcalcError(f"{name} needs files or code of a machine: the command line and Python take it")
        if name not in known and name not in ("model", "files"):
            raise FlopcalcError(f"a set-up has no {format_value(name)}.{format_nearest(str(name), known)}")
        if name not in ("model", "files"):
            fields[name] = _read_value(name, known[name], value)
    model = given.get("model", "")
    if not isinstance(model, str):
        raise FlopcalcError(f"model is a text, not {format_value(model)}")
    files = _read_files(given["files"]) if "files" in given else ()
    return Page(model.strip(), files, {name: value for name, value in fields.items() if value})


def _read_value(name: str, field: Field, value: object) -> Any:
    if field.repeats:
        wanted, is_right = "a list of texts", isinstance(value, list) and all(isinstance(each, str) for each in value)
    elif field.kind == "flag":
        wanted, is_right = "true or false", isinstance(value, bool)
    else:
        wanted, is_right = "a text", isinstance(value, str)
    if name == "routing" and isinstance(value, str) and not _ROUTING.fullmatch(value.strip()):
        wanted, is_right = "even, spread:S or rows per expert (N,N,…)", False
    if not is_right:
        raise FlopcalcError(f"{name} is {wanted}, not {format_value(value)}")
    if isinstance(value, list):
        return tuple(each.strip() for each in value if each.strip())
    return value.strip() if isinstance(value, str) else value


def _read_files(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping) or len(value) > _MOST_FILES:
        raise ConfigError(f"files is an object of at most {_MOST_FILES} names and texts")
    for name, text in value.items():
        if not isinstance(name, str) or _FILE.fullmatch(name) is None or ".." in name:
            raise ConfigError(f"{format_value(name)}: not the name of a JSON file")
        if not isinstance(text, str) or len(text) > MAX_JSON_BYTES:
            raise ConfigError(f"{name}: larger than {MAX_JSON_BYTES} bytes, the most that is read")
    return tuple(sorted(value.items()))


def list_given(page: Page, command: Command) -> dict[str, Any]:
    """The fields of the form that a command takes; the form serves all of them at once."""
    fields = list_fields(command)
    given = {name: value for name, value in page.fields.items() if name in fields}
    given = {name: value for name, value in given.items() if value != fields[name].default or name in _KEPT}
    if command == "plan" and PLAN_RECOMPUTE in page.fields:
        given["recompute"] = page.fields[PLAN_RECOMPUTE]
    elif command not in ("plan", "serving"):  # several degrees (1,2) are a plan's to try; a step has one of each
        given = {name: value for name, value in given.items() if fields[name].kind != "degrees" or "," not in value}
    return given


def make_page_setup(page: Page, command: Command) -> Setup:
    setup = make_setup(command, load_model(page), list_given(page, command))
    if (objective := setup.get("objective")) is not None and objective.teacher is not None:
        check_name(objective.teacher, "teacher: ")
    return setup


def count_page(
    page: Page, command: Command = "estimate", convention: Convention | None = None
) -> tuple[Setup, SetupEstimate]:
    """What a view counts; the last few bound models are kept, so that a slider asks one that is already bound."""
    setup = make_page_setup(page, command)
    notes: list[str] = []
    changing = [name for name, field in FIELDS.items() if field.group in ("work", "media")] + ["gpus", "step_time"]
    kept = {name: value for name, value in list_given(page, command).items() if name not in changing}
    key = (page.model, page.files, convention or setup.convention, str(sorted(kept.items())))
    estimator = _bound.pop(key, None) or bind_setup(setup, convention, notes)
    _bound[key] = estimator  # the newest stands last
    if len(_bound) > _MOST_BOUND:
        del _bound[next(iter(_bound))]
    return setup, count_bound(setup, estimator, [*setup.notes, *notes])


def load_model(page: Page) -> Source:
    """A preset, or the files of a page as if they lay in a folder; errors name them as the command line does."""
    model_type = page.fields.get("model_type") or None
    if not page.files:
        if not page.model:
            raise ConfigError("which model? Choose a preset, or give a config.json")
        check_name(page.model)
        return load_config(page.model, model_type=model_type)
    names = dict(page.files)
    # One file is read by its own name, as `flopcalc estimate my.json` would; several are a folder.
    single = next(iter(names)) if len(names) == 1 else "config.json" if "config.json" in names else ""
    with put_files(page.files) as folder:
        adapter = single or ADAPTER
        if os.path.basename(adapter) == ADAPTER and adapter in names:
            _check_base(read_json(os.path.join(folder, adapter), MAX_JSON_BYTES, ConfigError), names)
        source = load_config(os.path.join(folder, single) if single else folder, model_type=model_type)
    name = page.model or source.name
    return source.replace(name=name, where=_shorten(source.where, folder), reference=_shorten(source.reference, folder))


def check_name(name: str, before: str = "") -> None:
    """A name is that of a preset or a hub id: no file or folder of the machine that serves the page is read."""
    is_path = "/" in name and _HUB_ID.fullmatch(name) is None
    is_here = os.path.exists(os.path.expanduser(name)) and find_data_file("presets", name) is None
    if is_path or name.endswith(".json") or is_here:
        raise ConfigError(f"{before}{name[:200]!r}: no preset; drop its config.json, or ask the hub")


def _check_base(adapter: object, names: Iterable[str]) -> None:
    """The base that an adapter names was dropped with it, or is a name."""
    base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
    if isinstance(base, str) and base not in map(os.path.dirname, names):
        check_name(base, f"{ADAPTER}: its base: ")


@contextmanager
def put_files(files: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A folder with these files (name and text), for a while; errors do not name it."""
    from tempfile import TemporaryDirectory  # imported lazily: few set-ups bring files

    with TemporaryDirectory() as folder:
        for name, text in files:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        try:
            yield folder
        except FlopcalcError as error:
            raise type(error)(_shorten(str(error), folder)) from None


def _shorten(text: str, folder: str) -> str:
    return text.replace(folder + os.sep, "").replace(folder, "the folder")


def name_model(page: Page) -> str:
    """What the command line calls the model: a preset, a file, or the folder that was dropped."""
    names = [name for name, _ in page.files]
    if not names:
        return page.model
    return names[0] if len(names) == 1 else page.model or "FOLDER"


def write_lines(page: Page, what: str, op: str = "") -> dict[str, str]:
    """The same question as a command and as Python."""
    command = _VIEWS[what]
    given = list_given(page, command)
    words, pieces = ["flopcalc", command, name_model(page)], [repr(name_model(page))]
    batch = parse_size(page.fields.get("batch", "1"), "batch")
    many = f" * {batch}" if batch > 1 and command != "plan" else ""  # Python's lists are for the whole batch
    for name, value in given.items():
        if value is True:
            words.append(spell_option(name, ""))
        for each in () if value is True else (value,) if isinstance(value, str) else value:
            words += [spell_option(name, ""), each]
        shown = list(value) if isinstance(value, tuple) else int(value) if str(value).isdigit() else value
        if command != "estimate" or name not in BESIDE:
            pieces.append(f"{KEYWORDS.get(name, name)}={shown!r}{many if name in LISTS else ''}")
    words += (
        [spell_option("memory", "")] if what == "memory" else [spell_option("op", ""), op] if what == "explain" else []
    )
    line = f"{_FUNCTIONS.get(command, command)}({', '.join(pieces)})"
    return {"command": shlex.join(words), "python": f"{line}.total" if command == "estimate" else line}
