"""Where data is (shipped and the user's own), and how a TOML file is read from it.

Paths are strings here and in config.py: pathlib alone would cost a tenth of the command's start-up time.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from flopcalc.base.errors import FlopcalcError, SpecError, format_value
from flopcalc.base.files import (
    MAX_JSON_BYTES,
    MAX_TOML_BYTES,
    MAX_YAML_BYTES,
    check_entries,
    parse_json,
    parse_toml,
    parse_yaml,
    read_text,
)

_LIMITS = {".yaml": MAX_YAML_BYTES, ".yml": MAX_YAML_BYTES, ".json": MAX_JSON_BYTES, ".toml": MAX_TOML_BYTES}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOT = os.path.dirname(_PACKAGE)  # the checkout, if it is one
ALIASES = "aliases"  # a folder of key maps: foreign configs to known families
PARTS = "parts"  # a folder inside specs: towers and other parts of models, found by their names as specs are
DIFFUSERS = "diffusers"  # likewise: parts of pipelines, named by their classes


@cache
def find_data_dir() -> str:
    """The shipped model_specs folder: inside the package in a wheel, beside it in an editable install."""
    for folder in (os.path.join(_PACKAGE, "model_specs"), os.path.join(_ROOT, "model_specs")):
        if os.path.isdir(folder):
            return folder
    raise SpecError(f"model_specs not found next to {_PACKAGE}: the installation is incomplete, install flopcalc again")


def find_user_dir() -> str:
    """The user's own specs and presets: $FLOPCALC_DATA, else $XDG_DATA_HOME/flopcalc."""
    chosen = os.environ.get("FLOPCALC_DATA")
    if chosen:
        return chosen
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(base, "flopcalc")


def find_data_file(folder: str, name: str) -> str | None:
    """<folder>/<name>.toml in the user's data folder, else in the shipped one; a spec may be in specs/parts."""
    # A name is one path component: 'a/b' or '..' never leaves the folder.
    if not name or "/" in name or "\\" in name or "\0" in name or name.startswith("."):
        return None
    for root in (find_user_dir(), find_data_dir()):
        for place in _list_folders(root, folder):
            path = os.path.join(place, f"{name}.toml")
            if os.path.isfile(path):
                return path
    return None


def _list_folders(root: str, folder: str) -> tuple[str, ...]:
    path = os.path.join(root, folder)
    return (path, os.path.join(path, PARTS), os.path.join(path, DIFFUSERS)) if folder == "specs" else (path,)


def list_data_files(folder: str) -> dict[str, str]:
    """Name -> file of everything in a data folder; the user's files win."""
    found: dict[str, str] = {}
    for root in (find_data_dir(), find_user_dir()):
        for path in reversed(_list_folders(root, folder)):
            for entry in os.listdir(path) if os.path.isdir(path) else ():
                if entry.endswith(".toml"):
                    found[entry.removesuffix(".toml")] = os.path.join(path, entry)
    return dict(sorted(found.items()))


def load_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file, or a SpecError that names it."""
    text = read_text(path, MAX_TOML_BYTES, SpecError)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from None


_LONG = 1000  # characters of a path that is shown in part


def read_table(path: str, what: str, extra: str, error: type[FlopcalcError], is_unique: bool = False) -> Any:
    """The mapping in a YAML, TOML or JSON file with settings; `extra` installs PyYAML."""
    ending = os.path.splitext(path)[1].lower()
    if ending not in _LIMITS:
        raise error(f"{path if len(path) < _LONG else format_value(path)}: {what} is a {', '.join(_LIMITS)} file")
    text = read_text(path, _LIMITS[ending], error)
    try:
        if ending == ".toml":
            found: object = parse_toml(text)
        elif ending == ".json":
            found = parse_json(text, is_unique) if text.strip() else None
        else:
            found = parse_yaml(text, is_unique)
        check_entries(found)
    except ImportError:
        install = describe_install(extra)
        raise error(f"{path}: PyYAML is missing: {install}, or write the file as .toml or .json") from None
    except (ValueError, RecursionError) as problem:
        kind = "not valid JSON: " if ending == ".json" and type(problem) is not ValueError else ""
        raise error(f"{path}: {kind}{' '.join(str(problem).split())[:200]}") from None
    if found is not None and not isinstance(found, dict):
        raise error(f"{path}: holds {format_value(found)}, not a mapping of settings")
    return found or {}


def describe_install(extra: str) -> str:
    """The command that adds an extra's packages, to a wheel, an editable install or a bare checkout alike."""
    if find_version("flopcalc") is None and os.path.isfile(os.path.join(_ROOT, "pyproject.toml")):
        where = "." if os.path.realpath(_ROOT) == os.path.realpath(os.getcwd()) else _ROOT
        return f"pip install -e '{where}[{extra}]'"
    return f"pip install 'flopcalc[{extra}]'"  # pip takes the installed version, wherever it came from


def find_version(package: str) -> str | None:
    """The version of an installed package, which is not imported; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_commit() -> str | None:
    """The commit of this source tree, marked if files were changed; None outside a checkout.

    For a copy of the tree without its history, set the variable FLOPCALC_COMMIT.
    """
    import subprocess

    told = os.environ.get("FLOPCALC_COMMIT")
    if told or not os.path.exists(os.path.join(_ROOT, ".git")):  # a wheel may lie inside another project's tree
        return told or None
    try:
        done = subprocess.run(
            ["git", "-C", _ROOT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def get_stem(path: str) -> str:
    """'a/b/llama.toml' -> 'llama'."""
    return os.path.splitext(os.path.basename(path))[0]
