"""Packages of npm at the version and SHA-256 of a lock file, kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError
from flopcalc.base.spelling import spell
from flopcalc.core.estimate.traced import find_cache_dir

LOCK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pyodide.lock.json")
_TIMEOUT_S = 600


class Package(NamedTuple):
    """One package: what is fetched, and the files of it that are kept."""

    name: str
    version: str
    sha256: str  # of npm's archive
    files: dict[str, str]  # name -> SHA-256

    @property
    def spec(self) -> str:
        return f"{self.name}@{self.version}"


def load_lock(path: str = LOCK) -> Package:
    """A lock file's package."""
    with open(path, encoding="utf-8") as file:
        lock: dict[str, Any] = json.load(file)
    return Package(lock["package"], lock["version"], lock["sha256"], lock["files"])


def find_package(package: Package, folder: str | None = None) -> str:
    """The folder with a package's files: the one that is given, the cache's, or one that npm fills now."""
    if folder is not None:
        missing = [name for name in package.files if not os.path.isfile(os.path.join(folder, name))]
        if missing:
            raise FlopcalcError(f"{folder}: no {missing[0]}; it should hold the files of npm's {package.spec}")
        return folder
    kept = os.path.join(find_cache_dir(), "npm", f"{package.name}-{package.version}")
    if not _is_whole(kept, package):
        _fetch(package, kept)
    return kept


def is_locked(folder: str, package: Package) -> bool:
    """Whether a folder's files are those of the lock."""
    return all(_hash(os.path.join(folder, name)) == known for name, known in package.files.items())


def _is_whole(folder: str, package: Package) -> bool:
    return all(os.path.isfile(os.path.join(folder, name)) for name in package.files) and is_locked(folder, package)


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(package: Package, kept: str) -> None:
    """Fetch with npm, check, and put the files in place as a whole."""
    npm = shutil.which("npm")
    if npm is None:
        raise FlopcalcError(
            f"{package.spec} is fetched with npm, which is not here: install Node, or give "
            f"{spell('pyodide', 'DIR')} with its files"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", package.spec, "--silent", "--pack-destination", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=folder, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FlopcalcError(f"npm pack {package.spec} failed: {error}") from None
        archives = [name for name in os.listdir(folder) if name.endswith(".tgz")]
        if done.returncode or len(archives) != 1:
            reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no archive came")
            raise FlopcalcError(f"npm pack {package.spec} failed: {reason[:200]}")
        archive = os.path.join(folder, archives[0])
        found = _hash(archive)
        if found != package.sha256:
            raise FlopcalcError(f"npm's {package.spec} has SHA-256 {found}, not {package.sha256}: it is not used")
        _unpack(archive, package, kept)


def _unpack(archive: str, package: Package, kept: str) -> None:
    parent = os.path.dirname(kept)
    try:
        os.makedirs(parent, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as part, tarfile.open(archive) as tar:
            for name in package.files:
                member = tar.extractfile(f"package/{name}")
                assert member is not None  # the archive's hash was checked
                path = os.path.join(part, "new", name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with member, open(path, "wb") as file:
                    shutil.copyfileobj(member, file)
            shutil.rmtree(kept, ignore_errors=True)
            os.rename(os.path.join(part, "new"), kept)
    except OSError as error:
        raise FlopcalcError(f"{kept}: cannot be written: {error.strerror or error}") from None
