"""A predicted step as a trace: what host and device do, and where the host waits."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flopcalc import predict
from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.cli.predict import predict as command
from flopcalc.prediction.timeline import Segment, Span, run
from flopcalc.report.perfetto import make_trace, save_trace

OPTIONS: dict[str, Any] = {"device": "h200", "advise": False, "memory": False, "timeline": True}


def test_spans_of_a_small_step() -> None:
    """The host reads before its second piece, so it waits until the device is through with the first."""
    spans: list[Span] = []
    seconds = run([Segment(1.0, 5.0, 1.0), Segment(2.0, 1.0, 1.0, 1.0)], spans=spans)
    assert [(span.track, span.segment) for span in spans] == [
        ("host", 0),
        ("device", 0),
        ("waits", 1),
        ("host", 1),
        ("device", 1),
    ]
    lengths = [span.end_s - span.start_s for span in spans]
    assert lengths == pytest.approx([1.0, 5.0, 4.0, 2.0, 2.0])
    assert seconds == pytest.approx(7.0)


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_a_trace_of_a_device_bound_step(grad_accum: int) -> None:
    found = predict("llama-3.2-1b", batch_size=8, seq_len=2048, grad_accum=grad_accum, **OPTIONS)
    made = make_trace(found)
    events = [event for event in made["traceEvents"] if event["ph"] == "X"]
    device = [event for event in events if event["cat"] == "device"]
    assert sum(event["dur"] for event in device) == pytest.approx(1e6 * found.device_s, rel=0.02)
    assert made["otherData"]["step_time_s"] == found.step_time_s._asdict()
    names = [event["name"] for event in device]
    assert names.index("forward model.layers.0.mlp.up_proj") < names.index("forward model.layers.15.mlp.up_proj")
    assert names.index("backward model.layers.15.mlp.up_proj") < names.index("backward model.layers.0.mlp.up_proj")
    assert names[-1] == "optimizer"
    assert {event["args"]["name"] for event in made["traceEvents"] if event["name"] == "thread_name"} == {
        "host (CPU)",
        "device (GPU)",
        "host waits for the device",
    }
    assert [event for event in events if event["cat"] == "waits"]
    for track in ("host", "device"):  # nothing overlaps
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["cat"] == track)
        assert all(one[1] <= other[0] + 0.01 for one, other in pairwise(spans))


@pytest.mark.parametrize("execution", ["compiled", "graphs", "fused"])
def test_without_a_host_the_device_alone_is_shown(execution: Any) -> None:
    found = predict("llama-3.2-1b", batch_size=1, seq_len=512, execution=execution, **OPTIONS)
    events = [event for event in make_trace(found)["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} == {"device"}
    assert sum(event["dur"] for event in events) == pytest.approx(1e6 * found.device_s, rel=1e-3)


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    given = ["llama-3.2-1b", "--seq", "64", "--device", "h200", "--timeline", str(path)]
    assert CliRunner().invoke(command, given, catch_exceptions=False).exit_code == 0
    assert json.loads(path.read_text())["otherData"]["model"] == "llama-3.2-1b"
    refused = CliRunner().invoke(command, [*given, "--batch", "1,2"])
    assert isinstance(refused.exception, WorkloadError)
    assert "--timeline is of one step" in str(refused.exception)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    found = predict("llama-3.2-1b", batch_size=1, seq_len=64, **OPTIONS)
    with pytest.raises(FlopcalcError, match="cannot be written"):
        save_trace(found, str(tmp_path / "none" / "step.json"))
    plain = predict("llama-3.2-1b", batch_size=1, seq_len=64, device="h200", advise=False, memory=False)
    with pytest.raises(FlopcalcError, match="timeline=True"):
        make_trace(plain)
