"""The page's Python files compiled ahead by Pyodide under Node and kept in a cache: the page starts sooner."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile

from flopcalc.core.estimate.traced import find_cache_dir

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compile.mjs")
_TIMEOUT_S = 600


def compile_python(path: str, pyodide: str) -> bool:
    """Put compiled files in place of the sources in a zip; False where Node is missing or fails."""
    kept = _find_kept(path, pyodide)
    if not os.path.isfile(kept):
        node = shutil.which("node")
        if node is None or not _compile(node, path, pyodide, kept):
            return False
    try:
        shutil.copyfile(kept, path)
    except OSError:
        return False
    return True


def _find_kept(path: str, pyodide: str) -> str:
    """The cache's file for these sources, this script and this Pyodide."""
    digest = hashlib.sha256()
    for name in (path, _SCRIPT, os.path.join(pyodide, "python_stdlib.zip")):
        with open(name, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return os.path.join(find_cache_dir(), "web", f"{digest.hexdigest()[:32]}.zip")


def _compile(node: str, path: str, pyodide: str, kept: str) -> bool:
    """Compile into the cache, whose older file goes; False where that fails."""
    folder = os.path.dirname(kept)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part:
            made = os.path.join(part, "new.zip")
            command = [node, _SCRIPT, pyodide, path, made]
            subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
            for name in os.listdir(folder):
                if name.endswith(".zip"):
                    os.unlink(os.path.join(folder, name))
            os.replace(made, kept)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
