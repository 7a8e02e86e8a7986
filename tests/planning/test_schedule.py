"""The schedule of a planned step as a trace: every pass once, in order, as long as the plan says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flopcalc.api import plan
from flopcalc.base.errors import FlopcalcError
from flopcalc.planning.layout import Layout
from flopcalc.planning.schedule import list_tasks, run_schedule
from flopcalc.report.perfetto import make_schedule, save_schedule


@pytest.mark.parametrize(("pp", "virtual", "batches"), [(1, 1, 3), (4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 5, 4)])
def test_every_pass_runs_once_and_after_what_it_needs(pp: int, virtual: int, batches: int) -> None:
    layout = Layout(pp=pp, virtual=virtual)
    found = run_schedule(layout, batches, 1.0, 2.0)
    for rank in range(pp):
        assert sorted(list_tasks(layout, rank, batches)) == sorted(task for own, task, _ in found if own == rank)
        assert len(list_tasks(layout, rank, batches)) == 2 * batches * virtual
    starts = {(task, task.chunk * pp + rank): start for rank, task, start in found}
    for (task, stage), start in starts.items():
        for (other, place), before in starts.items():
            if other.batch == task.batch and other.is_forward and task.is_forward and place == stage - 1:
                assert before + 1.0 <= start


@pytest.mark.parametrize(("pp", "virtual"), [(4, 1), (4, 2)])
def test_idle_time_is_the_formulas(pp: int, virtual: int) -> None:
    """(pp - 1) / virtual stages of one micro-batch stand idle."""
    batches, forward, backward = 8, 1.0 / virtual, 2.0 / virtual
    found = run_schedule(Layout(pp=pp, virtual=virtual), batches, forward, backward)
    end = max(start + (forward if task.is_forward else backward) for _, task, start in found)
    assert end == pytest.approx(batches * 3.0 + (pp - 1) / virtual * 3.0)


def test_a_plans_trace(tmp_path: Path) -> None:
    found = plan("llama-3.1-8b", tokens="1B", device="h200", gpus=16, pp=4, tp=2, zero=1, micro_batch=1, virtual=1,
                 global_batch=16, top=1)  # fmt: skip
    trace = make_schedule(found)
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    assert {"compute", "communication", "bubble", "gradients", "optimizer"} <= kinds
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) / 1e6 == pytest.approx(found.best[0].step.seconds, rel=0.1)
    path = tmp_path / "plan.json"
    save_schedule(found, str(path))
    assert json.loads(path.read_text(encoding="utf-8")) == trace
    with pytest.raises(FlopcalcError, match="cannot be written"):
        save_schedule(found, str(tmp_path / "no" / "plan.json"))


def test_copies_to_the_host_are_in_the_trace() -> None:
    found = plan("llama-3.1-70b", tokens="1B", device="gb300", gpus=8, tp=1, pp=2, virtual=2, micro_batch=1, zero=2,
                 recompute="offload", global_batch=64, top=1)  # fmt: skip
    ends = [event["ts"] + event["dur"] for event in make_schedule(found)["traceEvents"] if event["ph"] == "X"]
    assert max(ends) / 1e6 == pytest.approx(found.best[0].step.seconds, rel=0.01)


def test_what_would_help_most_is_named() -> None:
    found = plan("llama-3.1-8b", tokens="1B", device="h200", gpus=16, pp=8, global_batch=16, top=1)
    assert found.helps.startswith("a larger global_batch")
    assert found.to_dict()["helps_most"] == found.helps
