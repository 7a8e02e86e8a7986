"""A shell script that launches a training: the settings in it, `--key value`, `key=value` and variables filled in."""

from __future__ import annotations

import re
import shlex
from typing import Any

from flopcalc.base.errors import ConfigError
from flopcalc.base.files import read_text

_LIMIT = 500_000
_MODULE = re.compile(r"(openrlhf\.cli|verl\.trainer)\.\w+|trl$")


def read_script(path: str) -> dict[str, Any]:
    """Settings by key, in text that is read as YAML's scalars are; `command` is the program that was recognized."""
    names: dict[str, str] = {}
    found: dict[str, Any] = {}
    for line in read_text(path, _LIMIT, ConfigError).replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#"):
            continue
        try:
            words = [_fill(word, names) for word in shlex.split(line)]
        except ValueError:  # a text of several lines
            continue
        if len(words) == 1 and (variable := re.fullmatch(r"([A-Za-z_]\w*)=([^(].*)", words[0])):
            names[variable[1]] = variable[2]
            continue
        _read_line(words, found)
    return found


def _fill(word: str, names: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: names.get(match[1], match[0]), word)


def _read_line(words: list[str], found: dict[str, Any]) -> None:
    key = ""
    for at, word in enumerate(words):
        if _MODULE.match(word):
            found["command"] = " ".join(words[at : at + 2]) if word == "trl" else word
        name, equals, value = word.removeprefix("--").removeprefix("+").partition("=")
        if word.startswith("--"):
            key = name
            if name:
                found[name] = _read_scalar(value) if equals else True
        elif equals and re.fullmatch(r"[A-Za-z_]+(\.[A-Za-z_]+)+", name):
            key, found[name] = "", _read_scalar(value)
        elif key and not word.startswith(("$", "-", ")", "|", "&", ";", ">")):
            before = found[key]
            found[key] = (
                _read_scalar(word) if before is True else [*(before if isinstance(before, list) else [before]), word]
            )


def _read_scalar(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None if text in ("null", "None") else text
