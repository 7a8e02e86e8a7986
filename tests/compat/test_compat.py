"""What users saw before the modules moved is still there: outputs, options, imports, and files as they were written."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import compat_table as table
import pytest

COMMANDS = [*table.CASES, "own data"]
SWEEP = (
    "sweep", "run", "--trainers", "StandardTrainer,DPSGDTrainer", "--batch-sizes", "2", "--seq-lens", "8",
    "--model-size", "tiny", "--device", "cpu", "--steps", "2", "--warmup", "1", "--logs-dir", "sweep", "--runs-dir",
    "runs", "--json",
)  # fmt: skip

# What `calibrate` asks torch about the machine; importing the real one would take five seconds.
STAND_IN = """
__version__ = "0.0"
class version:
    cuda = None
class backends:
    class cudnn:
        version = staticmethod(lambda: None)
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept files, where commands look for them; tests that write take a folder of their own."""
    return table.make_workspace(tmp_path_factory.mktemp("compat"))


@pytest.fixture(scope="module")
def outputs(workspace: Path) -> Iterator[Any]:
    """Command -> case -> its output in parts; a command runs once for all tests."""

    @cache
    def run(command: str) -> dict[str, table.Parts]:
        if command == "own data":
            calls = list(table.OWN_DATA.values())
            outcomes, _ = table.run_apart(workspace, calls, {"FLOPCALC_DATA": str(workspace / "data")})
            pairs = zip(table.OWN_DATA.items(), outcomes, strict=True)
            return {case: table.split(call[0], outcome) for (case, call), outcome in pairs}
        with table.enter(workspace):
            return {
                case: table.split(command, table.run_command([command, *arguments]))
                for case, arguments in table.CASES[command].items()
            }

    yield run
    run.cache_clear()


def join(lost: dict[str, list[str]]) -> str:
    return "\n".join(f"{case}: {line}" for case, lines in lost.items() for line in lines[:10])


# --- Outputs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", COMMANDS)
def test_values(outputs: Any, command: str) -> None:
    """Every key is still there, with its type and, unless it is a time or a sentence, its value; more keys are fine."""
    if command == "verify":
        pytest.importorskip("transformers")
    recorded = table.load_record(f"values/{command.replace(' ', '_')}")
    found = outputs(command)
    lost = {
        case: table.find_lost(kept["values"], found[case].values)
        + table.find_lost_types(kept["types"], found[case].types)
        for case, kept in recorded.items()
    }
    assert not any(lost.values()), join(lost)


@pytest.mark.parametrize("command", table.load_record("timings"))
def test_timings(outputs: Any, command: str) -> None:
    """Seconds, bytes and money; a change that is meant gets a line in CHANGELOG.md and `record.py timings`."""
    found = outputs(command)
    lost = {
        case: table.find_lost(kept, found[case].timings, is_near=True)
        for case, kept in table.load_record("timings")[command].items()
    }
    assert not any(lost.values()), join(lost)


@pytest.mark.parametrize("command", table.load_record("words"))
def test_words(outputs: Any, command: str) -> None:
    """Notes, tables and errors; sentences that were rewritten are recorded with `record.py words`."""
    found = outputs(command)
    lost = {
        case: table.find_lost(kept, found[case].words) for case, kept in table.load_record("words")[command].items()
    }
    assert not any(lost.values()), join(lost)


def test_every_case_is_recorded() -> None:
    for command in COMMANDS:
        cases = table.OWN_DATA if command == "own data" else table.CASES[command]
        assert set(table.load_record(f"values/{command.replace(' ', '_')}")) == set(cases), command


def test_schema(outputs: Any) -> None:
    """The contract's number stays 1 while keys are only added."""
    for case in ("dense", "vision", "decode"):
        assert outputs("estimate")[case].values["schema"] == 1
    assert outputs("compare")["two"].values["0/schema"] == 1


def test_a_lost_key_is_seen() -> None:
    """The comparison can fail."""
    kept = {"a/b": 1, "a/c": 1.0, "d": {}, "e": [1]}
    assert table.find_lost(kept, {**kept, "more": 2, "d/x": 1}) == []
    assert table.find_lost(kept, {"a/b": 1, "a/c": 1.0, "d/x": 3, "e": [1]}) == []
    assert table.find_lost(kept, {"a/b": 2, "a/c": 1, "d": {}, "e": [1, 2]}) == [
        "a/b: 1 -> 2",
        "a/c: 1.0 -> 1",
        "e: [1] -> [1, 2]",
    ]
    assert table.find_lost(kept, {}) == ["a/b: gone", "a/c: gone", "d: gone", "e: gone"]
    assert table.find_lost_types({"a/*/b": ["float"]}, {"a/*/b": ["float", "str"]}) == [
        "a/*/b: ['float'] -> ['float', 'str']"
    ]


# Options that changed nothing, and are refused by name now; the changelog says so.
REFUSED = {("translate", "--convention")}


def test_options() -> None:
    """Every command, option, choice and default; new ones are fine."""
    for call in (["-h"], ["estimate", "-h"], ["--version"]):
        assert table.run_command(call).code == 0
    found = table.list_options()
    for command, options in table.load_record("options").items():
        assert command in found, command
        flags = {flag: known for known in found[command].values() for flag in known["flags"]}
        for option in options.values():
            for flag in option["flags"]:
                if (command, flag) in REFUSED:
                    assert flag not in flags
                    continue
                assert flag in flags, f"{command} {flag}"
                now = flags[flag]
                assert set(option["choices"]) <= set(now["choices"]), f"{command} {flag}"
                assert option["default"] == now["default"], f"{command} {flag}"
                assert option["is_required"] or not now["is_required"], f"{command} {flag} is required now"
                assert now["is_repeatable"] or not option["is_repeatable"], f"{command} {flag}"


# --- Imports ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", table.load_record("imports")["imports"])
def test_imports(module: str) -> None:
    """What pages and notebooks import can be imported from there, if with a DeprecationWarning."""
    if module.startswith(("flopcalc.monitor", "flopcalc.measure")):
        pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module(module)
        for name, kind in table.load_record("imports")["imports"][module].items():
            if name == "FlopcalcMonitor":
                pytest.importorskip("lightning")
            value = getattr(found, name)
            if kind == "class":
                assert isinstance(value, type), name
            elif kind == "function":
                assert callable(value), name
                assert not isinstance(value, type), name
            else:
                assert type(value).__name__ == kind, name


def test_all() -> None:
    """`from flopcalc import *` gives what it gave."""
    for module in ("flopcalc", "flopcalc.monitor"):
        listed = importlib.import_module(module).__all__
        assert set(table.load_record("imports")["imports"][module]) <= set(listed)


# Scripts that a wheel lacked, and the modules that run in their place.
IN_THE_PACKAGE = {
    "tests/truth/fuzz.py": "lab.flags",
    "tests/truth/record.py": "lab.truth",
    "tests/truth/record_clipping.py": "lab.truth_clipping",
    "tests/truth/record_operators.py": "lab.operators",
    "tests/truth/record_types.py": "lab.truth",
}


def test_what_documents_run() -> None:
    for module in table.load_record("imports")["modules run"]:
        assert importlib.util.find_spec(f"{module}.__main__") or importlib.util.find_spec(module)
    for script in table.load_record("imports")["scripts run"]:
        if script in IN_THE_PACKAGE:
            assert importlib.util.find_spec(IN_THE_PACKAGE[script]), script
        else:
            assert (table.ROOT / script).is_file(), script


# --- Files that 0.1.0 wrote -------------------------------------------------------------------------------------------
# Predictor, tables, monitor logs, sweep results and the user's own TOML files are read by the commands above.
def test_own_files_are_read(outputs: Any) -> None:
    """The recorded outputs are those of the user's files, not of the shipped ones."""
    found = outputs("own data")
    assert found["predictor"].values["evidence/is_own_machine"] is True
    assert found["device, interconnect and price"].values["interconnect/id"] == "mini-link"
    assert found["device, interconnect and price"].timings["price/usd_per_gpu_hour"] == 0.5
    assert found["table"].values["rows/#"] == 4
    assert found["preset wins over the shipped one"].values["parameters/total"] < 100_000


def test_trace_cache(workspace: Path, tmp_path: Path) -> None:
    """A kept trace answers without torch. Its name holds the versions that made it, so these are pretended."""
    (kept,) = (workspace / "cache" / "traces").iterdir()
    made_with = json.loads(kept.read_text("utf-8"))["made_with"]
    version = made_with.pop("flopcalc")
    for library, number in made_with.items():
        about = tmp_path / f"{library}-{number}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {number}\n")
    (tmp_path / "torch.py").write_text("raise ImportError('the trace was not found')\n")
    call = ("estimate", "--model", "config.json", "--trace", "--seq", "64", "--batch", "3", "--json")
    (outcome,), loaded = table.run_apart(workspace, [call], {"PYTHONPATH": str(tmp_path)}, version)
    assert (outcome.code, loaded) == (0, []), outcome.err
    found = json.loads(outcome.out)
    assert (found["schema"], found["model"]["source"], found["convention"]) == (1, "trace", "full")
    # By hand: 13,888 FLOPs per token in linear layers and 128 per pair of tokens, 3 samples of 64 tokens.
    assert found["flops"]["forward"] == 3 * (64 * 13_888 + 64 * 64 * 128)
    assert found["flops"]["total"] == 3 * found["flops"]["forward"]


def rewrite_head(journal: Path, identity: dict[str, Any]) -> list[str]:
    """A journal is resumed only with the versions that began it: write this machine's into its first line."""
    head, *rest = journal.read_text("utf-8").splitlines(keepends=True)
    run = json.loads(head)["run"]
    assert set(identity) <= set(run)
    lines = [json.dumps({"run": run | identity}) + "\n", *rest]
    journal.write_text("".join(lines), "utf-8")
    return lines


def find_versions(*libraries: str) -> dict[str, str]:
    flopcalc = importlib.import_module("flopcalc").__version__
    found = {"flopcalc": flopcalc, "python": platform.python_version()}
    return found | {library: metadata.version(library) for library in libraries}


@pytest.mark.parametrize("kept_rows", [2, 1])
def test_sweep_goes_on(tmp_path: Path, kept_rows: int) -> None:
    """A whole journal is only read. Of one that is half done, the other half is run; without torch it fails at once."""
    for library in ("torch", "transformers", "opacus"):
        pytest.importorskip(library)
    shutil.copytree(table.FILES / "sweep", tmp_path / "sweep")
    journal = tmp_path / "sweep" / "journal.jsonl"
    lines = rewrite_head(journal, find_versions("torch", "transformers", "opacus"))
    journal.write_text("".join(lines[: 1 + kept_rows]), "utf-8")
    (tmp_path / "sweep" / "results.jsonl").unlink()
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text("raise ImportError('no torch for this test')\n")
    (outcome,), _ = table.run_apart(tmp_path, [SWEEP], {"PYTHONPATH": str(tmp_path / "fake")})
    assert outcome.code == (0 if kept_rows == 2 else 1), outcome.err
    rows = [json.loads(line) for line in (tmp_path / "sweep" / "results.jsonl").read_text("utf-8").splitlines()]
    before = [json.loads(line) for line in (table.FILES / "sweep" / "results.jsonl").read_text("utf-8").splitlines()]
    assert rows[:kept_rows] == before[:kept_rows]
    assert [row["status"] for row in rows] == ["ok"] * kept_rows + ["failed"] * (2 - kept_rows)
    assert journal.read_text("utf-8").splitlines(keepends=True)[: 1 + kept_rows] == lines[: 1 + kept_rows]


def test_calibration_goes_on(tmp_path: Path) -> None:
    """The journal of a calibration that is whole gives its table, and no row is measured again."""
    pytest.importorskip("transformers")
    (tmp_path / "torch.py").write_text(STAND_IN)
    state = tmp_path / "out" / ".run" / "cpu-test"
    shutil.copytree(table.FILES / "calibrate", state)
    identity = find_versions("transformers") | {
        "torch": "0.0",
        "cuda": None,
        "cudnn": None,
        "device": platform.processor() or platform.machine(),
        "commit": "recorded",
    }
    lines = rewrite_head(state / "journal.jsonl", identity)
    call = ("calibrate", "--suite", "test", "--tables", "gemm", "--out", "out")
    (outcome,), _ = table.run_apart(tmp_path, [call], {"FLOPCALC_COMMIT": "recorded", "PYTHONPATH": str(tmp_path)})
    assert outcome.code == 0, outcome.err
    assert (state / "journal.jsonl").read_text("utf-8").splitlines(keepends=True) == lines
    made = json.loads((tmp_path / "out" / "cpu" / "gemm.json").read_text("utf-8"))
    kept = json.loads((table.FILES / "calibration" / "mini-gpu" / "gemm.json").read_text("utf-8"))
    assert (made["schema"], made["columns"], made["rows"]) == (kept["schema"], kept["columns"], kept["rows"])


def test_what_the_monitor_writes(tmp_path: Path) -> None:
    """The log and goodput.json have the keys that they had."""
    from flopcalc import TrainingMonitor

    batch = {"input_ids": [[1] * 8] * 2, "attention_mask": [[1] * 8, [1] * 5 + [0] * 3]}
    settings = {"monitoring": {"mfu_calculation_mode": "estimate", "detail_every": 2, "device": "h200"}}
    with TrainingMonitor(str(tmp_path), settings, model="llama-3.2-1b") as monitor:
        for _ in range(6):
            with monitor.step(batch) as step:
                step.log(loss=2.5, learning_rate=1e-4, grad_norm=1.0, epoch=0)
    for name in ("flopcalc.jsonl", "goodput.json"):
        was, now = (read_keys(folder / name) for folder in (table.FILES / "monitor", tmp_path))
        assert {kind: keys - now[kind] for kind, keys in was.items() if keys - now[kind]} == {}


def read_keys(path: Path) -> dict[str, set[str]]:
    """Type of record -> its keys, those of objects inside it too."""
    text = path.read_text("utf-8")
    records = [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    found: dict[str, set[str]] = {}
    for record in records:
        flat = dict(table.flatten(record, {}))
        assert flat.get("schema", 1) == 1
        found.setdefault(record.get("type", ""), set()).update(flat)
    return found


def test_records_are_small_and_name_no_machine() -> None:
    files = [path for path in table.RECORDS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    for path in files:
        data = path.read_bytes()
        if path.suffix == ".gz":
            assert data[4:8] == bytes(4), f"{path.name} holds a time"
            data = table.gzip.decompress(data)
        for private in (b"/home/", b"/tmp/", os.fsencode(str(table.ROOT))):
            assert private not in data, f"{path.name} holds {private!r}"
