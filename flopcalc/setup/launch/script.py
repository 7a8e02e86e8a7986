"""A shell script, or a line of one, that launches a training: its settings, with variables of the script filled in."""

from __future__ import annotations

import re
import shlex
from typing import Any, NamedTuple

# What starts a training on several GPUs; the words between it and the program are its own settings.
_LAUNCHERS = {"accelerate": "accelerate", "torchrun": "torchrun", "deepspeed": "deepspeed",
              "torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}  # fmt: skip
_MODULE = re.compile(r"(openrlhf\.cli|verl\.trainer)\.\w+")
_PROGRAMS = ("trl", "swift", "megatron", "axolotl", "llamafactory-cli")  # the next word says what they do
_CONFIGS = ("config", "config_file", "job.config_file", "job.config-file")
_ASSIGNED = re.compile(r'^\s*(?:export\s+)?\w+="[^"]*"', re.MULTILINE)  # a text that a variable is given
_TABLES = (".yaml", ".yml", ".toml")


class Script(NamedTuple):
    """Settings by key, in text that is read as YAML's scalars are."""

    program: dict[str, Any]  # `command` is the program that was recognized
    launcher: dict[str, Any]  # `name` is the launcher
    files: dict[str, list[str]]  # files with settings of the two


def read_script(text: str) -> Script:
    """What the commands of a script say together."""
    names: dict[str, str] = {}
    script = Script({}, {}, {"program": [], "launcher": []})
    text = re.sub(r"(^|\s)#.*", r"\1", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in _ASSIGNED.sub(lambda each: each[0].replace("\n", " "), text).splitlines():
        try:
            words = shlex.split(_fill(line, names))
        except ValueError:  # another text of several lines
            continue
        is_exported = words[:1] == ["export"]
        words = words[is_exported:]
        if len(words) == 1 and (variable := re.fullmatch(r"([A-Za-z_]\w*)=([^(].*)", words[0])):
            names[variable[1]] = variable[2]
        elif not is_exported:
            _read_command(words, script)
        if is_exported:
            _read_variables([word if "=" in word else f"{word}={names.get(word, '')}" for word in words], script)
    return script


def _fill(word: str, names: dict[str, str]) -> str:
    """Variables by their values, or by what `${NAME:-value}` says."""
    return re.sub(
        r"\$(\w+)|\$\{(\w+)(?::-([^}]*))?\}", lambda each: names.get(each[1] or each[2], each[3] or each[0]), word
    )


def _read_command(words: list[str], script: Script) -> None:
    """Variables of the environment, a launcher with its settings, a program with its own."""
    words = [piece for word in words for piece in (word.split() if re.match(r"--[\w-]+ ", word) else [word])]
    _read_variables(words, script)
    names = [word.rpartition("/")[2] for word in words]
    # Axolotl's own command takes the launcher as an option's value.
    starts = [at for at, name in enumerate(names) if name in _LAUNCHERS and not names[at - 1].endswith("launcher")]
    at = starts[0] if starts else None
    if at is not None:
        script.launcher["name"] = _LAUNCHERS[words[at].rpartition("/")[2]]
        start = next((i for i in range(at + 1, len(words)) if _is_program(words[i])), len(words))
        own: dict[str, Any] = {}
        _read_line(words[at + 1 : start], own, script.files["launcher"])
        script.launcher.update({key.replace("-", "_"): value for key, value in own.items()})
        words = words[start:]
    _read_line(words, script.program, script.files["program"])


def _read_variables(words: list[str], script: Script) -> None:
    """Variables of the environment: torchrun's numbers of GPUs, and ms-swift's limits of an image."""
    for word in words:
        variable = re.fullmatch(r"(NPROC_PER_NODE|NNODES|MAX_PIXELS|IMAGE_MAX_TOKEN_NUM)=(\d+)", word)
        if variable is not None and variable[1].startswith("N"):
            script.launcher[variable[1]] = int(variable[2])
        elif variable is not None:
            script.program[f"ENV.{variable[1]}"] = int(variable[2])


def _is_program(word: str) -> bool:
    return word in ("-m", "--module", *_PROGRAMS) or word.endswith(".py") or _MODULE.match(word) is not None


def _read_line(words: list[str], found: dict[str, Any], files: list[str]) -> None:
    key = ""
    for at, word in enumerate(words):
        if _MODULE.match(word):
            found["command"] = word
        elif word in _PROGRAMS:
            found["command"] = " ".join(words[at : at + 2])
        elif word.endswith(".py") and not key and "command" not in found:
            found["command"] = word.rpartition("/")[2]
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
        elif word.endswith(_TABLES):
            files.append(word)
    files.extend(str(found.pop(key)) for key in _CONFIGS if str(found.get(key)).endswith(_TABLES))


def _read_scalar(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None if text in ("null", "None") else text
