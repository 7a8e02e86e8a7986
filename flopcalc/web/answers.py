"""The page's door into Python: a question as JSON in, its answer or a one-line error as JSON out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flopcalc.errors import DeviceError, FlopcalcError, RecipeError, WorkloadError, format_value
from flopcalc.files import parse_json
from flopcalc.units import parse_number, parse_size, parse_sizes
from flopcalc.web.lines import write_command, write_python
from flopcalc.web.setups import Counted, Setup, bind_setup, count, make_setup, read_compute
from flopcalc.words import CONVENTIONS, Execution

if TYPE_CHECKING:
    from flopcalc.planning.plan import Plan

Answer = dict[str, Any]
Progress = Callable[[int, int], None]  # layouts that are done, layouts in all

EXACT = 2**53 - 1  # JavaScript's numbers are exact up to here: what is larger is sent as text
_MOST_POINTS = 4000  # of a plan's picture


def answer(question: str, progress: Progress | None = None) -> str:
    """The answer to {"what": …, "setup": {…}}; whatever flopcalc refuses is {"error": "one line"}."""
    try:
        asked = parse_json(question)
        if not isinstance(asked, dict):
            raise FlopcalcError(f"a question is an object, not {format_value(asked)}")
        found = _answer(asked, progress)
    except (FlopcalcError, json.JSONDecodeError) as error:
        found = {"error": " ".join(str(error).split())}
    return json.dumps(_make_plain(found), ensure_ascii=False, allow_nan=False)


def _answer(asked: Mapping[str, object], progress: Progress | None) -> Answer:
    what = asked.get("what")
    setup = make_setup(asked.get("setup", {}))
    if what == "plan":
        return _answer_plan(setup, progress)
    if what == "launch":
        from flopcalc.web.launch import read_launch_file

        return read_launch_file(str(asked.get("name", "")), str(asked.get("text", "")), setup)
    if what == "explain":
        return _answer_explain(setup, str(asked.get("op", "")))
    known: dict[object, Callable[[Setup], Answer]] = {
        "flops": _answer_flops, "export": _answer_export, "conventions": _answer_conventions,
        "translate": _answer_translate, "time": _answer_time, "memory": _answer_memory, "roofline": _answer_roofline,
    }  # fmt: skip
    if what not in known:
        raise FlopcalcError(f"no such question: {format_value(what)}")
    return known[what](setup)


def _make_plain(value: object) -> Any:
    """A value as JavaScript reads it: large ints as text, what is no number as null."""
    if isinstance(value, dict):
        return {str(key): _make_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_plain(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write_lines(setup: Setup, what: str, counted: Counted, op: str = "") -> dict[str, str]:
    return {"command": write_command(setup, what, op), "python": write_python(setup, what, counted)}


def _answer_flops(setup: Setup) -> Answer:
    """FLOPs by module and component, parameters and weights."""
    counted = count(setup)
    return {
        "what": "flops",
        "work": counted.estimate.describe(),
        "estimate": _describe(setup, counted),
        "lines": _write_lines(setup, "flops", counted),
    }


def _describe(setup: Setup, counted: Counted) -> Answer:
    """What `flopcalc estimate --json` prints; on a device with the least time that its peak allows."""
    shown = counted.estimate.to_dict()
    shown["notes"] += counted.notes
    if setup.device:
        from flopcalc.core.estimate.utilization import describe_least_time

        shown["notes"] += describe_least_time(counted.estimate, device=setup.device, dtype=None, peak=None, gpus=1)
    return shown


def _answer_export(setup: Setup) -> Answer:
    """The texts that the command line prints for the same question as JSON and, by module, as CSV."""
    from flopcalc.report.estimate import format_csv

    counted = count(setup)
    return {
        "what": "export",
        "json": json.dumps(_describe(setup, counted), indent=2, ensure_ascii=False),
        "csv": format_csv(counted.estimate, "module", None),
    }


def _answer_explain(setup: Setup, op: str) -> Answer:
    from flopcalc.report.explanation import explain_rows  # each view loads what it needs: the first answer comes sooner

    counted = count(setup)
    operations = explain_rows(counted.estimate, op)
    exact = [entry for entry in operations if entry["path"] == op]
    command = write_command(setup, "explain", op)
    return {"what": "explain", "op": op, "operations": exact or operations, "lines": {"command": command}}


def _answer_conventions(setup: Setup) -> Answer:
    """Components under the three conventions, and totals under those that people quote."""
    from flopcalc.core.estimate.quoted import load_quoted

    counted = count(setup)
    parts: dict[str, dict[str, int]] = {}
    for convention in CONVENTIONS:
        own = counted.estimate if convention == counted.estimate.convention else count(
            setup, convention=convention).estimate  # fmt: skip
        for name, flops in own.by_component().items():
            if flops.total:
                parts.setdefault(name, {})[convention] = flops.total
    quoted = []
    for name, known in load_quoted().conventions.items():
        try:
            flops_under: int | None = counted.estimate.under(name)
            reason = ""
        except FlopcalcError as error:  # a formula that needs a dim which this model has not
            flops_under, reason = None, str(error)
        quoted.append(
            {
                "name": name, "flops": flops_under, "reason": reason, "counts": known.counts,
                "leaves_out": known.leaves_out, "source": known.source, "url": known.url,
            }
        )  # fmt: skip
    return {
        "what": "conventions",
        "components": [{"name": name, **values} for name, values in parts.items()],
        "totals": counted.estimate.totals,
        "quoted": quoted,
        "notes": counted.all_notes,
        "lines": _write_lines(setup, "flops", counted),
    }


def _answer_translate(setup: Setup) -> Answer:
    from flopcalc.api import translate

    counted = count(setup)
    found = translate(
        counted.estimate,
        from_=setup.from_ or None,
        mfu=setup.mfu or None,
        tflops=parse_number(setup.tflops, "--tflops") if setup.tflops else None,
        tokens_per_second=(
            parse_number(setup.tokens_per_second, "--tokens-per-second") if setup.tokens_per_second else None
        ),
        gpus=parse_size(setup.gpus, "--gpus") if setup.gpus else 1,
        device=setup.device or None,
        dtype=read_compute(setup) or "bf16",
    )
    found = found._replace(notes=(*found.notes, *counted.notes))
    shown = found.to_dict()
    return {
        "what": "translate",
        "translation": shown,
        "json": json.dumps(shown, indent=2, ensure_ascii=False),
        "lines": _write_lines(setup, "translate", counted),
    }


def _check_device(setup: Setup) -> None:
    if not setup.device:
        raise DeviceError("on which device? Choose one")
    if setup.clipping != "none":
        raise RecipeError("per-sample clipping is counted, not predicted: leave --clipping out")


def _read_step(setup: Setup) -> dict[str, Any]:
    """The options of a prediction beside those of its estimate."""
    execution: Execution = setup.execution or "eager"  # type: ignore[assignment]  # the prediction checks the word
    return {
        "device": setup.device, "dtype": read_compute(setup), "optimizer": setup.optimizer or "adamw",
        "execution": execution, "attention_kernel": setup.attention_kernel,
    }  # fmt: skip


def _answer_time(setup: Setup) -> Answer:
    """How long a step takes and why, as `flopcalc predict`."""
    from flopcalc.prediction.step import predict_estimate

    _check_device(setup)
    counted = count(setup, convention="hardware")
    found = predict_estimate(counted.estimate, **_read_step(setup))
    shown = {**found.to_dict(), "notes": list(dict.fromkeys([*found.notes, *counted.notes]))}
    return {
        "what": "time",
        "prediction": shown,
        "json": json.dumps(shown, indent=2, ensure_ascii=False),
        "lines": _write_lines(setup, "time", counted),
    }


def _answer_memory(setup: Setup) -> Answer:
    """What fills the memory, and what would fit: the largest batch, with and without recomputation, by device."""
    from flopcalc.hardware.devices import load_devices
    from flopcalc.prediction.memory import find_capacity
    from flopcalc.prediction.step import find_largest_batch, predict_estimate

    _check_device(setup)
    settings = _read_step(setup)
    counted = count(setup, convention="hardware")
    found = predict_estimate(counted.estimate, advise=False, **settings)
    assert found.memory is not None  # it was asked for
    kept = {}
    trains = setup.phase == "train" and counted.estimate.parameters["trainable"]
    for word in ("none", "full") if trains else ():
        other, estimate = found, counted.estimate
        if word != setup.recompute:
            estimate = count(replace(setup, recompute=word), convention="hardware").estimate
            other = predict_estimate(estimate, advise=False, **settings)
        assert other.memory is not None
        kept[word] = {
            "activations": other.memory.activations, "peak": other.memory.peak, "fits": other.fits,
            "largest_batch": find_largest_batch(estimate, **settings),
        }  # fmt: skip
    own = kept.get(setup.recompute)
    largest = own["largest_batch"] if own else find_largest_batch(counted.estimate, **settings)
    shown = {**found.to_dict()["memory_bytes"], "largest_batch": largest}
    devices = [
        {"id": device.id, "name": device.name, "capacity": find_capacity(device),
         "fits": found.memory.peak <= find_capacity(device)}
        for device in load_devices()[0]
        if device.memory_gb is not None
    ]  # fmt: skip
    return {
        "what": "memory",
        "memory": shown,
        "by_recompute": kept,
        "devices": devices,
        "notes": list(dict.fromkeys([*found.memory.notes, *counted.notes])),
        "json": json.dumps({"memory_bytes": shown, "by_recompute": kept}, indent=2, ensure_ascii=False),
        "lines": _write_lines(setup, "memory", counted),
    }


def _answer_roofline(setup: Setup) -> Answer:
    from flopcalc.prediction.roofline import make_roofline

    _check_device(setup)
    counted = count(setup, convention="hardware")
    settings = _read_step(setup)
    del settings["optimizer"]
    shown = make_roofline(counted.estimate, **settings).to_dict()
    return {
        "what": "roofline",
        "roofline": shown,
        "json": json.dumps(shown, indent=2, ensure_ascii=False),
        "notes": counted.all_notes,
        "lines": _write_lines(setup, "roofline", counted),
    }


def _answer_plan(setup: Setup, progress: Progress | None) -> Answer:
    """The layouts of a training run, as `flopcalc plan`; `progress` hears how many are timed."""
    from flopcalc.planning.plan import DEFAULT_SEQ

    if not setup.device:
        raise DeviceError("on which device? Choose one")
    for name, value in (("tokens", setup.tokens), ("gpus", setup.gpus)):
        if not value:
            raise WorkloadError(f"a plan needs --{name}: say how many {name.replace('gpus', 'GPUs')}")
    sample = replace(
        setup, batch="", grad_accum="", lengths="", phase="train", context="", logits="", recompute="none",
        clipping="none", convention="model", attention_kernel="auto", kv_cache="",
        seq=setup.seq or ("" if setup.text else str(DEFAULT_SEQ)),
    )  # fmt: skip
    counted = count(
        sample, spelled=("tokens", "gpus", "seq", "global_batch", "price", "decoder_seq", "text", "max_pixels")
    )
    found = _plan(sample, setup, counted, progress)
    shown = found.to_dict()
    front = {point.layout for point in found.find_front()}
    points = [
        {"step_time_s": point.step_time_s, "memory_bytes": point.memory_bytes, "layout": str(point.layout),
         "is_front": point.layout in front}
        for point in _thin(found, front)
    ]  # fmt: skip
    return {
        "what": "plan",
        "plan": shown,
        "points": points,
        "json": json.dumps(shown, indent=2, ensure_ascii=False, allow_nan=False),
        "lines": _write_lines(setup, "plan", counted),
    }


def _plan(sample: Setup, setup: Setup, counted: Counted, progress: Progress | None) -> Plan:
    from flopcalc.planning.layout import DEGREES
    from flopcalc.planning.plan import plan

    degrees: dict[str, Any] = {}
    for name in DEGREES:
        text = setup.plan_recompute if name == "recompute" else getattr(setup, name)
        if text and name == "recompute":
            degrees[name] = [word.strip() for word in text.split(",")]
        elif text and name == "zero":
            degrees[name] = tuple(parse_size(piece.strip(), "--zero", 0) for piece in text.split(","))
        elif text:
            degrees[name] = parse_sizes(text, f"--{name.replace('_', '-')}")
    found = plan(
        bind_setup(sample),
        workload=counted.estimate.terms[0].load,
        tokens=setup.tokens,
        device=setup.device,
        gpus=parse_size(setup.gpus, "--gpus"),
        global_batch=parse_size(setup.global_batch, "--global-batch") if setup.global_batch else None,
        interconnect=setup.interconnect or None,
        price=parse_number(setup.price, "--price") if setup.price else None,
        dtype=read_compute(setup),
        execution=setup.execution or "fused",
        optimizer=setup.optimizer or "adamw-master",
        progress=progress,
        **degrees,
    )
    assumed = [] if setup.seq or setup.text else [f"no length given: sequences of {sample.seq} tokens assumed"]
    return found._replace(notes=(*counted.notes, *assumed, *found.notes))


def _thin(found: Plan, front: set[Any]) -> list[Any]:
    """The plan's points; of very many, the front and an even share of the others."""
    points = list(found.points)
    step = -(-len(points) // _MOST_POINTS)
    return [point for at, point in enumerate(points) if at % step == 0 or point.layout in front]
