"""Where data lies (shipped and the user's own), and how a TOML file is read from it."""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from flopcalc.errors import SpecError

MAX_FILE_BYTES = 10_000_000


@cache
def find_data_dir() -> Path:
    """The shipped model_specs folder: inside the package in a wheel, beside it in an editable install."""
    package = Path(__file__).parent
    for folder in (package / "model_specs", package.parent / "model_specs"):
        if folder.is_dir():
            return folder
    raise SpecError(f"model_specs not found beside {package}: the installation is incomplete, install flopcalc again")


def find_user_dir() -> Path:
    """The user's own specs and presets: $FLOPCALC_DATA, else $XDG_DATA_HOME/flopcalc."""
    chosen = os.environ.get("FLOPCALC_DATA")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "flopcalc"


def find_data_file(folder: str, name: str) -> Path | None:
    """<folder>/<name>.toml in the user's data folder, else in the shipped one."""
    # A name is one path component: 'a/b' or '..' never leaves the folder.
    if not name or "/" in name or "\\" in name or name.startswith("."):
        return None
    for root in (find_user_dir(), find_data_dir()):
        path = root / folder / f"{name}.toml"
        if path.is_file():
            return path
    return None


def list_data_files(folder: str) -> dict[str, Path]:
    """Name -> file of everything in a data folder; the user's files win."""
    found: dict[str, Path] = {}
    for root in (find_data_dir(), find_user_dir()):
        for path in sorted((root / folder).glob("*.toml")):
            found[path.stem] = path
    return dict(sorted(found.items()))


def load_toml(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise SpecError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
