"""`flopcalc crosscheck` on a tiny config.json: the table, the JSON, and every refusal as one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from families import load_tiny

from flopcalc.cli import main


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path, "llama")


def write_config(folder: Path, family: str) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(load_tiny(family).config))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        main(["crosscheck", *arguments])
    captured = capsys.readouterr()
    return int(exit_info.value.code or 0), captured.out, captured.err


def test_table(config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, _ = run(capsys, "--model", config, "--seq", "13", "--batch", "2")
    assert code == 0
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    for name in ("flop_counter", "fvcore", "profiler, corrected"):
        assert "1 (exact)" in rows[name]
    assert "forward only" in rows["fvcore"]
    assert "1 (exact)" not in rows["profiler"]  # as it comes, with elementwise work
    assert "no CUDA device here" in rows["cupti"]
    assert "too slow for a whole step" in rows["ncu"]
    assert "no CUDA device here" in rows["gpm"]
    assert "full" not in rows["gpm"]  # a gauge is compared with nothing
    assert "train, 2 × 13 tokens; fp32, eager attention, on cpu" in out
    assert "analytic, full: 3." in out


@pytest.mark.heavy
def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, "qwen2_vl")
    arguments = ["--seq", "17", "--image-grid", "1,4,6", "--layers", "2", "--freeze", "vision", "--device", "cpu"]
    code, out, _ = run(capsys, "--model", config, *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    assert found["layers"] == {"text_config.num_hidden_layers": 2, "vision_config.depth": 2}
    assert (found["dtype"], found["attention"], found["attention_kernel"]) == ("fp32", "eager", "eager")
    assert found["recipe"]["freeze"] == ["vision"]
    assert found["workload"]["images"] == 1
    rows = {row["witness"]: row for row in found["witnesses"]}
    assert list(rows) == ["flop_counter", "fvcore", "profiler", "cupti", "ncu", "gpm"]
    assert rows["flop_counter"]["ratio"] == rows["fvcore"]["ratio"] == rows["profiler"]["ratio"] == 1
    assert rows["profiler"]["total"] != rows["profiler"]["corrected"] == rows["profiler"]["expected"]
    assert rows["cupti"]["total"] is None
    assert rows["cupti"]["ratio"] is None
    assert rows["cupti"]["reason"]
    assert sum(rows["flop_counter"]["by"].values()) == rows["flop_counter"]["total"]


def test_one_product_and_a_gauge(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flopcalc.measure.counters import ncu, witness

    counted = ncu.KernelProfile((ncu.LaunchedKernel("gemm", {ncu.DEFAULT_COUNTERS[0]: 48.0}),), 1.5)
    monkeypatch.setattr(ncu, "measure_kernels", lambda _: counted)
    monkeypatch.setattr(witness, "_choose_product", lambda *_: ((2, 3, 4), "bf16"))
    monkeypatch.setattr(
        witness, "gauge", lambda *_: witness.WitnessCount("gpm", None, {}, {}, 0.4, "tensor cores active 50.0%")
    )
    code, out, _ = run(capsys, "--model", config, "--seq", "8", "--device", "cpu")
    assert code == 0
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "1 (exact)" in rows["ncu"]
    assert "its largest product alone" in rows["ncu"]
    assert "tensor cores active 50.0%" in rows["gpm"]
    assert "analytic, 2·m·n·k of 2 × 3 × 4: 48" in out


@pytest.mark.heavy
def test_sdpa_and_lora(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--attention", "sdpa", "--lora", "r=4,targets=q_proj", "--device", "cpu", "--json"]
    code, out, _ = run(capsys, "--model", config, "--seq", "9", *arguments)
    assert code == 0
    rows = {row["witness"]: row for row in json.loads(out)["witnesses"]}
    assert rows["flop_counter"]["total"] == rows["profiler"]["corrected"] > rows["flop_counter"]["expected"]
    assert "2.5 ×" in rows["flop_counter"]["reason"]
    assert rows["cupti"]["expected_as"] == "hardware, flash"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq", "8", "--layers", "0"], "--layers"),
        (["--seq", "8", "--layers", "two"], "--layers"),
        ([], "--seq"),
        (["--seq", "8", "--image-grid", "1,4,4"], "text model"),
        (["--seq", "8", "--phase", "decode"], "decode"),
        (["--seq", "8", "--freeze", "nothing.*"], "nothing.*"),
        (["--seq", "8", "--device", "cuda"], "no CUDA device"),
    ],
)
def test_refusals(
    arguments: list[str],
    message: str,
    config: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run(capsys, "--model", config, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_torch(config: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from flopcalc.cli import main; main(['crosscheck', '--model', {config!r}, '--seq', '8'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "flopcalc: crosscheck runs the model, and torch is not installed: pip install 'flopcalc[measure]'\n"
    )


LIST_LOADED = """
import sys
from flopcalc.cli import main
try: main([{command!r}, "--model", {config!r}, "--seq", "8"])
except SystemExit: pass
print([name for name in sys.modules if name.startswith(("torch", "flopcalc.measure", "fvcore"))])
"""


def list_loaded(command: str, config: str) -> str:
    code = LIST_LOADED.format(command=command, config=config)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_estimate_loads_none_of_it(config: str) -> None:
    assert list_loaded("estimate", config) == "[]"


@pytest.mark.heavy
def test_the_same_check_finds_something_where_torch_is_used(config: str) -> None:
    assert "flopcalc.measure.counters.witness" in list_loaded("crosscheck", config)
