"""The table of commands whose output is recorded, and the functions that run, split, keep and compare it.

Nothing here imports a module of flopcalc by a private path: modules will move, and this file must not notice.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDS = HERE / "records"
_MOST_PLAIN_BYTES = 40_000
FILES = RECORDS / "files"  # written by flopcalc 0.1.0; kept as they are

Json = dict[str, Any]
Flat = dict[str, Any]  # "flops/total" -> 12

# --- What is recorded -------------------------------------------------------------------------------------------------
LLAMA = ("--model", "llama-3.2-1b", "--seq", "1024")
GPT2 = ("--model", "gpt2", "--seq", "128")
QWEN = ("--model", "qwen2.5-0.5b", "--seq", "512", "--batch", "2")
VISION = ("--model", "qwen2-vl-2b", "--text", "256", "--image", "640x480")
HARDWARE = ("--convention", "hardware")
H200 = ("--device", "h200")
DECODE = ("--phase", "decode", "--context", "2048", "--batch", "8")

# Command -> case -> arguments behind the command. Every case runs in a folder with the files of records/files.
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "estimate": {
        "dense": (*LLAMA, "--json"),
        "dense batch accumulated": (*LLAMA, "--batch", "2", "--grad-accum", "4", "--depth", "1", "--json"),
        "full": (*LLAMA, "--convention", "full", "--depth", "2", "--json"),
        "hardware": (*LLAMA, *HARDWARE, "--depth", "2", "--json"),
        "hardware eager": (*LLAMA, *HARDWARE, "--attention-kernel", "eager", "--depth", "1", "--json"),
        "hardware efficient": (*LLAMA, *HARDWARE, "--attention-kernel", "efficient", "--depth", "1", "--json"),
        "hardware cudnn h200": (
            *LLAMA, *HARDWARE, "--attention-kernel", "cudnn", *H200, "--depth", "1", "--json",
        ),
        "hardware flash h200": (
            *LLAMA, *HARDWARE, "--attention-kernel", "flash", *H200, "--depth", "1", "--json",
        ),
        "hardware a100": (*LLAMA, *HARDWARE, "--device", "a100-sxm-80gb", "--depth", "1", "--json"),
        "lora": (*LLAMA, "--lora", "r=16,targets=q_proj+v_proj", "--json"),
        "lora all-linear save": (*LLAMA, "--lora", "r=8,targets=all-linear,save=lm_head", "--depth", "2", "--json"),
        "recompute": (*LLAMA, "--recompute", "full", *HARDWARE, "--depth", "2", "--json"),
        "recompute reentrant": (
            *LLAMA, "--recompute", "full-reentrant", *HARDWARE, "--freeze", "model.embed_tokens", "--depth", "1",
            "--json",
        ),
        "clipping hooks": (*GPT2, "--clipping", "hooks", *HARDWARE, "--depth", "3", "--json"),
        "clipping ghost": (
            "--model", "sweep-tiny", "--seq", "128", "--clipping", "ghost", *HARDWARE, "--depth", "1", "--json",
        ),
        "clipping refused": (*GPT2, "--clipping", "ghost", *HARDWARE, "--json"),
        "clipping fast": (*GPT2, "--clipping", "fast", *HARDWARE, "--depth", "1", "--json"),
        "packed": ("--model", "llama-3.2-1b", "--lengths", "512,100,37", "--depth", "1", "--json"),
        "packed hardware": ("--model", "llama-3.2-1b", "--lengths", "512,100,37", *HARDWARE, "--depth", "1", "--json"),
        "prefill": (*LLAMA, "--phase", "prefill", "--depth", "1", "--json"),
        "forward last": (*LLAMA, "--phase", "forward", "--logits", "last", "--depth", "1", "--json"),
        "decode": ("--model", "llama-3.2-1b", *DECODE, "--depth", "1", "--json"),
        "window": ("--model", "gemma-3-1b", "--seq", "2048", "--depth", "4", "--json"),
        "moe": ("--model", "mixtral-8x7b", "--seq", "1024", "--json"),
        "moe decode": ("--model", "qwen3-30b-a3b", *DECODE, "--depth", "2", "--json"),
        "mla moe": ("--model", "deepseek-v2-lite", "--seq", "512", "--depth", "3", "--json"),
        "state space": ("--model", "mamba-130m", "--seq", "300", "--depth", "3", "--json"),
        "hybrid": ("--model", "qwen3-next-80b-a3b", "--seq", "512", "--depth", "3", "--json"),
        "vision": (*VISION, "--json"),
        "vision frozen": (*VISION, "--freeze", "vision", "--depth", "2", "--json"),
        "vision train only": (*VISION, "--train-only", "projector", "--depth", "2", "--json"),
        "vision grids": (
            "--model", "qwen2.5-vl-3b", "--seq", "2048", "--image-grid", "1,34,46", "--video-grid", "2,16,24",
            "--depth", "2", "--json",
        ),
        "vision tiles": ("--model", "llava-next", "--text", "64", "--image", "1024x768", "--depth", "2", "--json"),
        "encoder": ("--model", "modernbert-base", "--seq", "512", "--depth", "2", "--json"),
        "encoder-decoder": (
            "--model", "t5-v1.1-xl", "--seq", "256", "--decoder-seq", "64", "--depth", "2", "--json",
        ),
        "audio": ("--model", "voxtral-mini-3b", "--text", "64", "--audio", "30", "--depth", "2", "--json"),
        "mfu": (*LLAMA, *H200, "--num-devices", "8", "--step-time", "0.01", "--depth", "1", "--json"),
        "mfu peak": (*LLAMA, "--peak", "1e14", "--step-time", "0.5", "--depth", "1", "--json"),
        "least time": (*LLAMA, *H200, "--dtype", "fp8", "--depth", "1", "--json"),
        "by module": (*LLAMA, "--by", "module", "--depth", "2", "--json"),
        "by kind": (*LLAMA, "--by", "kind", "--depth", "1", "--json"),
        "config by path": ("--model", "config.json", "--seq", "128", "--json"),
        "config by folder": ("--model", "gpt2-tiny", "--seq", "128", "--json"),
        "own spec": ("--model", "herring.json", "--spec", "herring.toml", "--seq", "300", "--json"),
        "csv": (*LLAMA, "--format", "csv"),
        "csv by module": (*LLAMA, "--by", "module", "--format", "csv"),
        "csv by kind": (*LLAMA, "--by", "kind", "--format", "csv"),
        "markdown": (*VISION, "--format", "markdown"),
        "table": (*LLAMA,),
        "table by module": (*LLAMA, "--by", "module", "--depth", "2"),
        "no length": ("--model", "llama-3.2-1b", "--json"),
        "unknown model": ("--model", "lama-3.2-1b", "--seq", "8", "--json"),
        "unknown device": (*LLAMA, "--device", "h300", "--json"),
        "two lengths": (*LLAMA, "--text", "8"),
    },
    "explain": {
        "attention": (*LLAMA, "--op", "*self_attn", "--json"),
        "linear": (*LLAMA, "--op", "*.q_proj", "--json"),
        "all": ("--model", "config.json", "--seq", "64", "--op", "*", "--json"),
        "packed": ("--model", "llama-3.2-1b", "--lengths", "512,100", "--op", "*self_attn", "--json"),
        "lora": (*LLAMA, "--lora", "r=16,targets=q_proj+v_proj", "--op", "*.q_proj*", "--json"),
        "hardware": (*LLAMA, *HARDWARE, *H200, "--recompute", "full", "--op", "*self_attn*", "--json"),
        "experts": ("--model", "mixtral-8x7b", "--seq", "64", "--op", "*mlp*", "--json"),
        "vision": (*VISION, "--op", "*visual*", "--json"),
        "encoder-decoder": (
            "--model", "t5-v1.1-xl", "--seq", "64", "--decoder-seq", "16", "--op", "*ttention*", "--json",
        ),
        "decode": ("--model", "llama-3.2-1b", *DECODE, "--op", "*self_attn", "--json"),
        "clipping": (*GPT2, "--clipping", "fast", *HARDWARE, "--op", "*c_fc", "--json"),
        "text": (*LLAMA, "--op", "*self_attn"),
        "no match": (*LLAMA, "--op", "nothing", "--json"),
    },
    "compare": {
        "two": ("llama-3.2-1b", "qwen3-0.6b", "--seq", "1024", "--json"),
        "own options": (
            "llama-3.2-1b@seq=512;batch=2", "mixtral-8x7b@phase=decode;context=64", "--seq", "1024", "--json",
        ),
        "images": ("qwen2-vl-2b@image=640x480", "qwen2-vl-2b", "--seq", "2048", "--json"),
        "recipes": (
            "llama-3.2-1b@lora=r=8,targets=q_proj", "llama-3.2-1b@freeze=model.layers.0.*+lm_head",
            "llama-3.2-1b@convention=hardware;recompute=full", "--seq", "512", "--json",
        ),
        "path": ("config.json", "config.json@lengths=10,20", "--seq", "64", "--json"),
        "table": ("llama-3.2-1b", "qwen3-0.6b", "--seq", "1024"),
        "wrong key": ("llama-3.2-1b@sequence=8", "--json"),
    },
    "models": {"all": ("--json",), "coverage": ("--coverage", "--json")},
    "devices": {"all": ("--json",)},
    "calibration": {
        "list": ("list", "--json"),
        "show steps": ("show", "h200-sxm", "steps", "--json"),
        "show folder": ("show", "calibration/mini-gpu", "gemm", "--json"),
        "diff": ("diff", "h200-sxm", "h200-sxm", "--json"),
        "diff folder": ("diff", "calibration/mini-gpu", "h200-sxm", "--json"),
        "no table": ("show", "h200-sxm", "nothing", "--json"),
    },
    "predict": {
        "training": (*QWEN, *H200, "--json"),
        "memory": (*QWEN, *H200, "--memory", "--json"),
        "recompute": (*QWEN, *H200, "--recompute", "full", "--memory", "--json"),
        "prefill": (*QWEN, *H200, "--phase", "prefill", "--json"),
        "decode": ("--model", "qwen2.5-0.5b", *DECODE, *H200, "--memory", "--json"),
        "lora": (*QWEN, *H200, "--lora", "r=16,targets=q_proj+v_proj", "--json"),
        "vision": (*VISION, *H200, "--json"),
        "moe": ("--model", "qwen1.5-moe-a2.7b", "--seq", "512", *H200, "--memory", "--json"),
        "compiled": (*QWEN, *H200, "--compile", "--json"),
        "host factor": (*QWEN, *H200, "--host-factor", "1.5", "--optimizer", "adamw-foreach", "--json"),
        "other device": (*QWEN, "--device", "a100-sxm-80gb", "--json"),
        "fp32": (*QWEN, *H200, "--dtype", "fp32", "--json"),
        "packed": ("--model", "qwen2.5-0.5b", "--lengths", "512,100,37", *H200, "--json"),
        "encoder-decoder": ("--model", "t5-v1.1-xl", "--seq", "256", "--decoder-seq", "64", *H200, "--json"),
        "config by path": ("--model", "config.json", "--seq", "128", *H200, "--json"),
        "table": (*QWEN, *H200, "--memory"),
        "no device": (*QWEN, "--json"),
    },
    "plan": {
        "four": (
            "--model", "qwen2.5-0.5b", "--tokens", "1B", "--device", "h100-sxm", "--gpus", "4", "--seq", "2048",
            "--global-batch", "32", "--json",
        ),
        "sixteen": (
            "--model", "llama-3.1-8b", "--tokens", "300B", *H200, "--gpus", "16", "--seq", "4096",
            "--global-batch", "64", "--micro-batch", "1,2", "--recompute", "none,full", "--zero", "1,3", "--top", "2",
            "--json",
        ),
        "experts": (
            "--model", "qwen1.5-moe-a2.7b", "--tokens", "10B", *H200, "--gpus", "8", "--seq", "2048", "--global-batch",
            "32", "--micro-batch", "1", "--zero", "1", "--pp", "1", "--price", "2.5", "--top", "2", "--json",
        ),
        "vision lora": (
            "--model", "qwen2-vl-2b", "--tokens", "1B", *H200, "--gpus", "2", "--text", "256", "--image", "640x480",
            "--lora", "r=16,targets=q_proj+v_proj", "--global-batch", "16", "--top", "1", "--json",
        ),
        "table": (
            "--model", "qwen2.5-0.5b", "--tokens", "1B", "--device", "h100-sxm", "--gpus", "4", "--seq", "2048",
            "--global-batch", "32",
        ),
        "unknown interconnect": (
            "--model", "qwen2.5-0.5b", "--tokens", "1B", *H200, "--gpus", "4", "--interconnect", "string", "--json",
        ),
    },
    "verify": {"gpt2": ("--model-type", "gpt2", "--seq", "8", "--json")},
    "monitor": {
        "folder": ("show", "monitor", "--json"),
        "file last": ("show", "monitor/flopcalc.jsonl", "--last", "2", "--json"),
        "text": ("show", "monitor"),
        "no log": ("show", "nowhere", "--json"),
    },
    "sweep": {
        "summary": ("summarize", "--logs-dir", "sweep", "--json"),
        "markdown": ("summarize", "--logs-dir", "sweep", "--markdown"),
        "no results": ("summarize", "--logs-dir", "nowhere", "--json"),
    },
}  # fmt: skip

# Run in a process of its own, with FLOPCALC_DATA at the user's folder: what that folder holds is read once.
OWN_DATA: dict[str, tuple[str, ...]] = {
    "spec and preset": ("estimate", "--model", "herring-mini", "--seq", "300", "--json"),
    "preset wins over the shipped one": ("estimate", "--model", "gpt2", "--seq", "16", "--json"),
    "device": (
        "estimate", "--model", "herring-mini", "--seq", "64", "--device", "mini-gpu", "--step-time", "1", "--json",
    ),
    "tables": ("calibration", "list", "--json"),
    "table": ("calibration", "show", "mini-gpu", "gemm", "--json"),
    "predictor": ("predict", *QWEN, *H200, "--json"),
    "device, interconnect and price": (
        "plan", "--model", "qwen2.5-0.5b", "--tokens", "1B", "--device", "mini-gpu", "--gpus", "2", "--seq", "512",
        "--global-batch", "8", "--top", "1", "--json",
    ),
}  # fmt: skip

# --- Which part of an output a value belongs to -----------------------------------------------------------------------
# Lists that may grow: path of the list -> the keys that name an item.
KEYED: dict[str, dict[str, tuple[str, ...]]] = {
    "models": {
        "families": ("spec",),
        "presets": ("name",),
        "mappings": ("auto_class",),
        "mappings/*/types": ("model_type", "architecture"),
    },
    "devices": {"devices": ("id",)},
    "calibration": {"": ("device", "table")},
}
# Only the type is recorded: it differs between machines and versions.
PLACES = re.compile(r"(^|/)(version|file|evidence/predictor/path|evidence/commit)$")
# Sentences: compared in a test of their own, so that they can be rewritten.
WORDS = re.compile(
    r"(^|/)(notes|note|advice|why|lines|measured_note|peak_note)$"  # lines: formulas of explain
    r"|^interconnect/source$|^price/source$|^table$"
)
# Seconds, bytes, money and what follows from them. Everything in `predict` and `plan` is, but for these.
TIMED_COMMANDS = ("predict", "plan")
COUNTED = re.compile(
    r"^(model|parameters|device|dtype|gpus|tokens|seq|global_batch|interconnect/id|flops(/.*)?"
    r"|evidence/(device|measured_on|is_measured|is_own_machine|operators_recorded|host_measured)"
    r"|evidence/predictor/(origin|device))$"
)


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


class Parts(NamedTuple):
    """An output, flat, in the parts that are compared apart."""

    values: Flat  # exact
    timings: Flat
    words: Flat
    types: dict[str, list[str]]  # path with * for every index -> types of its values


def split(command: str, outcome: Outcome) -> Parts:
    """The parts of an output; `command` is estimate, predict …"""
    parts = Parts({"exit code": outcome.code}, {}, {}, {})
    if outcome.code == 2:
        parts.values["lines of stderr"] = outcome.err.count("\n")
        parts.words["stderr"] = outcome.err.splitlines()
        return parts
    try:
        flat = dict(flatten(json.loads(outcome.out), KEYED.get(command, {})))
    except ValueError:
        if outcome.out.startswith(("component,", "module,", "kind,", "path,")):
            flat = {"csv": outcome.out.splitlines()}
        else:
            flat = {"table": outcome.out.splitlines()}
    types: dict[str, set[str]] = {}
    for path, value in flat.items():
        generic = "/".join("*" if step.isdigit() else step for step in path.split("/"))
        if not path.endswith("#"):
            types.setdefault(generic, set()).add(type(value).__name__)
        if PLACES.search(path):
            continue
        if WORDS.search(path) or (command == "plan" and path.startswith("evidence/")):
            parts.words[path] = value
        elif command in TIMED_COMMANDS and not COUNTED.match(path):
            parts.timings[path] = value
        else:
            parts.values[path] = value
    parts.types.update({path: sorted(found) for path, found in types.items()})
    return parts


def flatten(
    value: Any, keyed: Mapping[str, Sequence[str]], path: str = "", generic: str = ""
) -> Iterator[tuple[str, Any]]:
    """'a/0/b' -> value for every leaf; a list of plain values is one leaf, and 'a/#' is how long a list is."""
    join = (lambda name: f"{path}/{name}") if path else str
    join_generic = (lambda name: f"{generic}/{name}") if generic else str
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flatten(each, keyed, join(key), join_generic(key))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        names = keyed.get(generic)
        if names is None:
            yield join("#"), len(value)
        for index, each in enumerate(value):
            name = str(index) if names is None else " ".join(str(each[key]) for key in names if key in each)
            yield from flatten(each, keyed, join(name), join_generic("*"))
    else:
        yield path, value


def find_lost(recorded: Mapping[str, Any], found: Mapping[str, Any], is_near: bool = False) -> list[str]:
    """What was recorded and is not there any more, or is another; what was added is fine."""
    lost = []
    for path, value in recorded.items():
        if path not in found:
            # An empty object may have got keys.
            if not (value == {} and any(other.startswith(f"{path}/") for other in found)):
                lost.append(f"{path}: gone")
        elif not is_same(value, found[path], is_near):
            lost.append(f"{path}: {value!r} -> {found[path]!r}")
    return lost


def is_same(a: Any, b: Any, is_near: bool) -> bool:
    """Equal, and of one type; `is_near` lets the last digits differ, for math.exp may differ between C libraries."""
    if is_near and isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return type(a) is type(b) and a == b


def find_lost_types(recorded: Mapping[str, list[str]], found: Mapping[str, list[str]]) -> list[str]:
    """Paths that are gone or hold another type."""
    lost = []
    for path, types in recorded.items():
        if path not in found:
            if types != ["dict"] or not any(other.startswith(f"{path}/") for other in found):
                lost.append(f"{path}: gone")
        elif not set(found[path]) <= set(types):
            lost.append(f"{path}: {types} -> {found[path]}")
    return lost


# --- Running ----------------------------------------------------------------------------------------------------------
def find_main() -> Callable[[list[str]], None]:
    """The function behind the command `flopcalc`, as the project's metadata names it."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        module, _, name = tomllib.load(file)["project"]["scripts"]["flopcalc"].partition(":")
    found: Callable[[list[str]], None] = getattr(import_module(module), name)
    return found


def run_command(arguments: Sequence[str]) -> Outcome:
    """Run `flopcalc ARGUMENTS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            find_main()(list(arguments))
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Outcome(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def enter(folder: Path) -> Iterator[None]:
    """Work in a folder that `make_workspace` made, with no data of the user's own."""
    before, variables = os.getcwd(), dict(os.environ)
    os.environ |= {"FLOPCALC_DATA": str(folder / "no-data"), "FLOPCALC_CACHE": str(folder / "cache")}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


def make_workspace(folder: Path) -> Path:
    """A folder with the kept files where commands look for them; data/ is a user's data folder."""
    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    predictors = folder / "data" / "predictors"
    predictors.mkdir()
    (predictors / "h200-sxm.json").write_bytes(gzip.decompress((folder / "predictor.json.gz").read_bytes()))
    shutil.copytree(folder / "calibration", folder / "data" / "calibration")
    return folder


def run_apart(
    folder: Path, commands: Sequence[Sequence[str]], environment: Mapping[str, str], version: str | None = None
) -> tuple[list[Outcome], list[str]]:
    """Run commands in one process of their own; their outcomes, and which heavy packages were loaded.

    `version`: what flopcalc is to take for its own version, as the names of kept traces contain it.
    """
    given = {"commands": [list(command) for command in commands], "version": version}
    paths = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
    variables = {**os.environ, "FLOPCALC_DATA": str(folder / "no-data"), "FLOPCALC_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, str(HERE / "compat_table.py")], input=json.dumps(given), capture_output=True, text=True,
        cwd=folder, env={**variables, **environment, "PYTHONPATH": paths}, timeout=120,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    answer = json.loads(done.stdout)
    return [Outcome(*outcome) for outcome in answer["outcomes"]], answer["loaded"]


def _answer_apart() -> None:
    given = json.load(sys.stdin)
    if given["version"]:
        import_module("flopcalc")
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "flopcalc" and hasattr(module, "__version__"):
                module.__version__ = given["version"]
    outcomes = [run_command(command) for command in given["commands"]]
    loaded = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
    json.dump({"outcomes": outcomes, "loaded": loaded}, sys.stdout)


# --- Options of the command line --------------------------------------------------------------------------------------
def list_options() -> dict[str, Json]:
    """'sweep run' -> its options and arguments: flags, choices, default; walked from the click group."""
    import click

    groups: list[click.Command] = []

    def capture(self: click.Command, *_: Any, **__: Any) -> Any:
        groups.append(self)
        raise click.exceptions.Exit(0)

    real = click.Command.make_context
    click.Command.make_context = capture  # type: ignore[method-assign]
    try:
        run_command(["--help"])
    finally:
        click.Command.make_context = real  # type: ignore[method-assign]
    found: dict[str, Json] = {}

    def walk(command: click.Command, name: str) -> None:
        found[name] = {"/".join(sorted(p.opts + p.secondary_opts)): _describe(p) for p in command.params}
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in command.list_commands(context):
                known = command.get_command(context, child)
                assert known is not None
                walk(known, f"{name} {child}".strip())

    walk(groups[0], "")
    return found


def _describe(parameter: Any) -> Json:
    default = parameter.default if isinstance(parameter.default, (str, int, float, bool)) else None
    return {
        "flags": sorted(parameter.opts + parameter.secondary_opts),
        "choices": sorted(getattr(parameter, "words", ()) or getattr(parameter.type, "choices", ())),
        "default": default or None,  # click's releases write "none given" differently
        "is_required": parameter.required,
        "is_repeatable": bool(getattr(parameter, "multiple", False)),
    }


# --- Files ------------------------------------------------------------------------------------------------------------
def load_record(name: str) -> Any:
    plain = RECORDS / f"{name}.json"
    return json.loads(plain.read_bytes() if plain.exists() else gzip.decompress(_add_gz(plain).read_bytes()))


def save_record(name: str, content: Any) -> None:
    """Plain while it is small enough to be read; the same content is the same bytes."""
    data = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    plain = RECORDS / f"{name}.json"
    plain.unlink(missing_ok=True)
    _add_gz(plain).unlink(missing_ok=True)
    if len(data) <= _MOST_PLAIN_BYTES:
        plain.write_bytes(data)
    else:
        _add_gz(plain).write_bytes(gzip.compress(data, mtime=0))


def _add_gz(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


if __name__ == "__main__":
    _answer_apart()
