"""Real trainers of TRL: every product of every step, on a counter of its own, beside what the monitor counted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiers import mark_heavy

trl = pytest.importorskip("trl", reason="needs trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # trainers warn of their own arguments
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_cases() -> Any:
    spec = importlib.util.spec_from_file_location("trl_steps", BENCHMARKS / "trl_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trl_steps"] = module
    spec.loader.exec_module(module)
    return module


STEPS = load_cases()
NAMES = list(STEPS.CASES)


@pytest.mark.parametrize(
    ("name", "mode"),
    mark_heavy([(name, mode) for mode in ("estimate", "smart") for name in NAMES], [("dpo lora", "estimate")]),
)
def test_every_product_of_every_pass_is_counted(name: str, mode: str, tmp_path: Path) -> None:
    steps = STEPS.run_case(name, mode, "cpu", tmp_path)
    assert len(steps) == STEPS.STEPS
    seen: set[str] = set()
    for step in steps:
        seen |= step.split.keys()
        assert step.counted == pytest.approx(step.executed, rel=1e-3)
        if not step.record["perf/source"].startswith("smart"):  # a step that was measured has no time
            assert step.record["perf/mfu"] > 0
            assert step.record["perf/mfu_step"] > 0
    assert seen - {"train"} == STEPS.CASES[name][4]
    assert mode == "estimate" or "operator counter" in steps[-1].record["perf/source"]


def test_every_step_on_the_gpu_was_counted() -> None:
    found = json.loads((BENCHMARKS / "results" / "trl_steps.json").read_text())
    assert {(each["case"], each["mode"]) for each in found["cases"]} == {
        (name, mode) for name in NAMES for mode in STEPS.MODES
    }
    for each in found["cases"]:
        assert len(each["steps"]) == STEPS.STEPS
        for step in each["steps"]:
            assert step["counted"] == pytest.approx(step["executed"], rel=1e-3), each["case"]
        assert "estimate (" not in each["source"], each  # each mode measured what it says


def test_a_grpo_step_on_the_gpu_spent_little_in_the_monitor() -> None:
    found = json.loads((BENCHMARKS / "results" / "grpo_overhead.json").read_text())
    assert found["provenance"]["device_id"] == "h200-sxm"
    for arm in ("estimate", "smart"):
        assert 0 < found["inside_share"][arm] < 0.01
        assert found["has_same_losses"][arm]
