"""Write down what users see: outputs and options of every command, documented imports, files as they are written.

python tests/compat/record.py            the outputs and options again (values, timings, words, options)
python tests/compat/record.py timings    one part of them only, when a change of it is meant
python tests/compat/record.py --check    compare all parts, and write nothing
python tests/compat/record.py imports    the list of documented imports: it should stay that of 0.1.0
python tests/compat/record.py files      the files that flopcalc writes (1 minute): they should stay those of 0.1.0
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import compat_table as table

PARTS = ("values", "timings", "words", "options")
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((table.ROOT / "docs").glob("*.md"))))


# --- Outputs ----------------------------------------------------------------------------------------------------------
def collect_outputs() -> dict[str, dict[str, table.Parts]]:
    """Command -> case -> the parts of its output."""
    with tempfile.TemporaryDirectory() as name:
        folder = table.make_workspace(Path(name))
        found: dict[str, dict[str, table.Parts]] = {}
        with table.enter(folder):
            for command, cases in table.CASES.items():
                found[command] = {}
                for case, arguments in cases.items():
                    found[command][case] = table.split(command, table.run_command([command, *arguments]))
        outcomes, _ = table.run_apart(folder, list(table.OWN_DATA.values()), {"FLOPCALC_DATA": str(folder / "data")})
        found["own data"] = {
            case: table.split(arguments[0], outcome)
            for (case, arguments), outcome in zip(table.OWN_DATA.items(), outcomes, strict=True)
        }
        text = json.dumps(found)
        for private in (name, str(table.ROOT)):
            if private in text:
                raise SystemExit(
                    f"a recorded value holds the path {private}: {text[text.index(private) - 300 :][:400]}"
                )
    return found


def record_outputs(parts: Sequence[str]) -> None:
    found = collect_outputs()
    if "values" in parts:
        for command, cases in found.items():
            kept = {case: {"values": part.values, "types": part.types} for case, part in cases.items()}
            table.save_record(f"values/{command.replace(' ', '_')}", kept)
    for name in ("timings", "words"):
        if name in parts:
            kept = {
                command: {case: getattr(part, name) for case, part in cases.items() if getattr(part, name)}
                for command, cases in found.items()
            }
            table.save_record(name, {command: cases for command, cases in kept.items() if cases})
    if "options" in parts:
        table.save_record("options", table.list_options())


# --- Imports ----------------------------------------------------------------------------------------------------------
def list_code(root: Path) -> Iterator[str]:
    """Python code that pages and notebooks show."""
    for page in PAGES:
        yield from re.findall(r"^```py[^\n]*\n(.*?)^```$", (root / page).read_text("utf-8"), re.M | re.S)
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield "".join(line for line in cell["source"] if not line.startswith(("%", "!")))


def collect_imports() -> dict[str, Any]:
    """Module -> names that documents import from it, with what each is; and the scripts that documents run."""
    names: dict[str, set[str]] = {}
    for code in list_code(table.ROOT):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flopcalc":
                names.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "flopcalc":
                        names.setdefault(alias.name, set())
    texts = [(table.ROOT / page).read_text("utf-8") for page in PAGES]
    notebooks = sorted((table.ROOT / "notebooks").glob("*.ipynb"))
    texts += [path.read_text("utf-8") for path in notebooks]
    for text in texts:  # in prose, as `flopcalc.plan` or `flopcalc.measure.gpm`
        for path in re.findall(r"`(flopcalc(?:\.\w+)+)", text):
            module, _, name = path.rpartition(".")
            if find_module(path):
                names.setdefault(path, set())
            elif find_module(module) and hasattr(importlib.import_module(module), name):
                names.setdefault(module, set()).add(name)
    for module in ("flopcalc", "flopcalc.monitor"):
        names.setdefault(module, set()).update(importlib.import_module(module).__all__)
    modules = {
        module: {name: describe(getattr(importlib.import_module(module), name)) for name in sorted(found)}
        for module, found in sorted(names.items())
    }
    runs = {match for text in texts for match in re.findall(r"python (-m flopcalc[\w.]*|[\w/]+\.py)", text)}
    return {
        "imports": modules,
        "modules run": sorted(run.removeprefix("-m ") for run in runs if run.startswith("-m ")),
        "scripts run": sorted(run for run in runs if not run.startswith("-m ")),
    }


def find_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def describe(value: Any) -> str:
    return "class" if isinstance(value, type) else "function" if callable(value) else type(value).__name__


# --- Files that flopcalc writes ---------------------------------------------------------------------------------------
MONITORED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from flopcalc import TrainingMonitor

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
model = LlamaForCausalLM(config).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ids = torch.randint(3, 100, (2, 16))
settings = {"monitoring": {"peak_flops_per_s": 1e12, "detail_every": 2}}
for _ in range(2):  # two runs in one log
    monitor = TrainingMonitor("monitor", settings, model=model)
    for step in range(1, 7):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, epoch=0, loss=loss, grad_norm=None, learning_rate=0.01)
    monitor.close()
"""
SWEEP = (
    "sweep", "run", "--trainers", "StandardTrainer,DPSGDTrainer", "--batch-sizes", "2", "--seq-lens", "8",
    "--model-size", "tiny", "--device", "cpu", "--steps", "2", "--warmup", "1", "--logs-dir", "sweep", "--runs-dir",
    "runs",
)  # fmt: skip
CALIBRATE = ("calibrate", "--suite", "test", "--tables", "gemm", "--out", "out")
TRACE = ("estimate", "--model", "config.json", "--trace", "--seq", "64", "--json")


def record_files() -> None:
    """Run the code that writes each kind of file; data/, config.json and herring.* are written by hand and stay."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(table.FILES / "config.json", folder)
        places = {"FLOPCALC_CACHE": str(folder / "cache"), "FLOPCALC_DATA": str(folder / "no-data")}
        environment = {**os.environ, **places, "FLOPCALC_COMMIT": "recorded", "PYTHONPATH": str(table.ROOT)}
        calls = [["-c", MONITORED], *(["-m", "flopcalc", *arguments] for arguments in (SWEEP, CALIBRATE, TRACE))]
        for call in calls:
            subprocess.run([sys.executable, *call], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        kept = {
            "monitor/flopcalc.jsonl": "monitor/flopcalc.jsonl",
            "monitor/goodput.json": "monitor/goodput.json",
            "sweep/journal.jsonl": "sweep/journal.jsonl",
            "sweep/results.jsonl": "sweep/results.jsonl",
            "out/.run/cpu-test/journal.jsonl": "calibrate/journal.jsonl",
            "out/cpu/gemm.json": "calibration/mini-gpu/gemm.json",
        }
        shutil.rmtree(table.FILES / "cache", ignore_errors=True)
        kept |= {
            f"cache/traces/{path.name}": f"cache/traces/{path.name}" for path in (folder / "cache/traces").iterdir()
        }
        for source, target in kept.items():
            text = (folder / source).read_text("utf-8")
            if name in text or str(table.ROOT) in text:
                raise SystemExit(f"{source} holds a path of this machine")
            (table.FILES / target).parent.mkdir(parents=True, exist_ok=True)
            (table.FILES / target).write_text(text, "utf-8")
    shipped = next(path for path in table.ROOT.rglob("predictors/h200-sxm.json") if table.HERE not in path.parents)
    (table.FILES / "predictor.json.gz").write_bytes(gzip.compress(shipped.read_bytes(), mtime=0))


# --- Command line -----------------------------------------------------------------------------------------------------
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join((*PARTS, "imports", "files")))
    parser.add_argument("--check", action="store_true", help="run the tests that compare")
    options = parser.parse_args()
    if options.check:
        return subprocess.call([sys.executable, "-m", "pytest", "-n", "0", str(table.HERE / "test_compat.py")])
    parts = options.parts or PARTS
    for part in parts:
        if part not in (*PARTS, "imports", "files"):
            parser.error(f"no part {part!r}")
    (table.RECORDS / "values").mkdir(parents=True, exist_ok=True)
    if "files" in parts:
        record_files()
    if "imports" in parts:
        table.save_record("imports", collect_imports())
    if set(parts) & set(PARTS):
        record_outputs(parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
