"""The page's door into Python: a question as JSON in, its answer or a one-line error as JSON out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flopcalc.base.errors import DeviceError, FlopcalcError, format_value
from flopcalc.base.files import format_json, parse_json
from flopcalc.base.spelling import spell_option, use_spelling
from flopcalc.base.vocabulary import CONVENTIONS, check_word
from flopcalc.setup.counting import SetupEstimate, find_shares
from flopcalc.setup.setup import Setup
from flopcalc.web.setups import Page, count_page, make_page_setup, read_page, write_lines

if TYPE_CHECKING:
    from flopcalc.core.estimate.estimate import Estimate
    from flopcalc.hardware.devices import Device
    from flopcalc.planning.plan import Plan
    from flopcalc.prediction.memory.peak import Memory

Answer = dict[str, Any]
Progress = Callable[[int, int], None]  # layouts that are done, layouts in all

EXACT = 2**53 - 1  # JavaScript's numbers are exact up to here: what is larger is sent as text
_MOST_POINTS = 4000  # of a plan's picture
_MOST_LARGEST = 1 << 24
_UNIT_SEQ = 256  # a longest sequence is a multiple of it
# Fields beside which another cannot be changed alone.
_FIXED = {"batch": ("lengths", "global_batch"), "seq": ("lengths", "text", "image", "video", "audio")}
_LOADS = (1, 4, 16, 64, 256)  # requests in flight of a serving curve
_IMAGE = "1024x1024"  # of a curve over images, where the form has none
# What each curve goes over.
_CURVES = {
    "seq": tuple(1 << power for power in range(8, 18)),
    "batch": tuple(1 << power for power in range(9)),
    "images": (0, 1, 2, 4, 8, 16),
    "gpus": tuple(1 << power for power in range(0, 13, 2)),
}


def answer(question: str, progress: Progress | None = None) -> str:
    """The answer to {"what": …, "setup": {…}}; whatever flopcalc refuses is {"error": "one line"}."""
    try:
        asked = parse_json(question)
        if not isinstance(asked, dict):
            raise FlopcalcError(f"a question is an object, not {format_value(asked)}")
        with use_spelling(spell_option):
            found = _answer(asked, progress)
    except (FlopcalcError, json.JSONDecodeError, RecursionError) as error:
        found = {"error": " ".join(str(error).split())}
    return json.dumps(_make_plain(found), ensure_ascii=False, allow_nan=False)


def _answer(asked: Mapping[str, object], progress: Progress | None) -> Answer:
    what = asked.get("what")
    page = read_page(asked.get("setup", {}))
    if what == "plan":
        return _answer_plan(page, progress)
    if what == "launch":
        from flopcalc.web.launch import read_launch_file

        return read_launch_file(str(asked.get("name", "")), str(asked.get("text", "")), page)
    if what == "explain":
        return _answer_explain(page, str(asked.get("op", "")))
    if what == "curve":
        return _answer_curve(page, str(asked.get("over", "")), str(asked.get("of", "")))
    known: dict[object, Callable[[Page], Answer]] = {
        "flops": _answer_flops, "export": _answer_export, "conventions": _answer_conventions,
        "translate": _answer_translate, "time": _answer_time, "memory": _answer_memory,
        "longest": lambda page: {"what": "longest", "tokens": _find_largest(page, "seq")},
        "roofline": _answer_roofline, "serving": _answer_serving, "loads": _answer_loads,
    }  # fmt: skip
    if not isinstance(what, str) or what not in known:
        raise FlopcalcError(f"no such question: {format_value(what)}")
    return known[what](page)


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


def _answer_flops(page: Page) -> Answer:
    """FLOPs by module and component, parameters and weights."""
    from flopcalc.report.html.treemap import Leaf, build_tree, find_groups

    setup, counted = count_page(page)
    shown = _describe(setup, counted)
    leaves = [Leaf(row["path"], row["kind"], row["forward"] + row["backward"]) for row in shown["modules"]]
    return {
        "what": "flops",
        "work": counted.estimate.describe(),
        "estimate": shown,
        "groups": [group.path for group in find_groups(build_tree(leaves))],  # a colour each
        "unused": list_unused(counted.estimate),
        "lines": write_lines(page, "flops"),
    }


def list_unused(estimate: Estimate) -> list[str]:
    """Fields of the form that say nothing about such a model: the page hides them."""
    from flopcalc.core.model.ops import list_routed

    estimator, load, _ = estimate.terms[0]
    if estimate.pipeline is not None:
        return ["seq", "lengths", "decoder_seq", "context", "logits", "audio", "image_grid", "video_grid", "max_pixels"]
    is_there = {
        ("image", "image_grid", "video", "video_grid", "max_pixels"): estimator.vision is not None,
        ("audio",): estimator.audio is not None,
        ("decoder_seq",): load.decoder is not None,
        ("routing", "ep", "expert_imbalance"): bool(list_routed(estimator.stages)),
        ("sampling_steps", "guidance", "parts", "strength", "images_per_prompt", "references"): False,
    }
    return [name for names, is_used in is_there.items() if not is_used for name in names]


def _describe(setup: Setup, counted: SetupEstimate) -> Answer:
    """What `flopcalc estimate --json` prints."""
    shown = counted.estimate.to_dict()
    mfu, hfu, notes = find_shares(counted, setup)
    shown["mfu"], shown["hfu"] = (share.to_dict() if share else None for share in (mfu, hfu))
    shown["notes"] += [*counted.notes, *notes]
    return shown


def _answer_export(page: Page) -> Answer:
    """The texts that the command line prints for the same question as JSON and, by module, as CSV."""
    from flopcalc.report.estimate import format_csv

    setup, counted = count_page(page)
    return {
        "what": "export",
        "json": format_json(_describe(setup, counted)),
        "csv": format_csv(counted.estimate, "module", None),
    }


def _answer_explain(page: Page, op: str) -> Answer:
    from flopcalc.report.explanation import explain_rows  # each view loads what it needs: the first answer comes sooner

    _, counted = count_page(page, "explain")
    operations = explain_rows(counted.estimate, op)
    exact = [entry for entry in operations if entry["path"] == op]
    command = write_lines(page, "explain", op)["command"]
    return {"what": "explain", "op": op, "operations": exact or operations, "lines": {"command": command}}


def _answer_conventions(page: Page) -> Answer:
    """Components under the three conventions, and totals under those that people quote."""
    from flopcalc.core.estimate.published_conventions import load_quoted

    _, counted = count_page(page)
    parts: dict[str, dict[str, int]] = {}
    for convention in CONVENTIONS:
        is_own = convention == counted.estimate.convention
        own = counted.estimate if is_own else count_page(page, convention=convention)[1].estimate
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
        "lines": write_lines(page, "flops"),
    }


def _answer_translate(page: Page) -> Answer:
    from flopcalc.api import translate_counted

    setup, counted = count_page(page, "translate")
    shown = translate_counted(counted, setup).to_dict()
    return {
        "what": "translate",
        "translation": shown,
        "json": format_json(shown),
        "lines": write_lines(page, "translate"),
    }


def _count_step(page: Page) -> tuple[Setup, SetupEstimate, dict[str, Any]]:
    """A step on the chosen device, and how it runs."""
    from flopcalc.api import list_step_options

    if "device" not in page.fields:
        raise DeviceError("on which device? Choose one")
    setup, counted = count_page(page, "predict", "hardware")
    return setup, counted, list_step_options(setup, counted.estimate)


def _answer_time(page: Page) -> Answer:
    """How long a step takes and why, as `flopcalc predict`."""
    from flopcalc.api import predict_counted

    setup, counted, _ = _count_step(page)
    shown = predict_counted(counted, setup).to_dict()
    return {
        "what": "time",
        "prediction": shown,
        "json": format_json(shown),
        "lines": write_lines(page, "time"),
    }


def _answer_memory(page: Page) -> Answer:
    """What fills the memory of a step, what checkpointing changes, and where it fits; a device is optional."""
    from flopcalc.hardware.devices import load_devices
    from flopcalc.prediction.memory.peak import find_capacity

    counted, memory = _find_memory(page)
    estimator, load, _ = counted.estimate.terms[0]
    chosen = estimator.recipe.recompute
    kept = {}
    for word in ("none", "full") if estimator.trains(load) else ():
        own = page.set(recompute=word)
        step, other = (counted, memory) if word == chosen else _find_memory(own)
        kept[word] = {
            "activations": other.activations,
            "peak": other.peak,
            "flops": step.estimate.totals["hardware"],
            "largest_batch": _find_largest(own, "batch"),
        }
    device = _find_device(page)
    capacity = find_capacity(device) if device is not None and device.memory_gb is not None else None
    largest = kept[chosen]["largest_batch"] if chosen in kept else _find_largest(page, "batch")
    shown = {
        **memory.to_dict(),
        "fits": None if capacity is None else memory.peak <= capacity,
        "capacity": capacity,
        "largest_batch": largest,
    }
    devices = [
        {"id": each.id, "name": each.name, "capacity": find_capacity(each), "fits": memory.fits(each)}
        for each in load_devices()[0]
        if each.memory_gb is not None
    ]
    return {
        "what": "memory",
        "memory": shown,
        "by_recompute": kept,
        "devices": devices,
        "notes": list(dict.fromkeys([*memory.notes, *counted.notes])),
        "json": format_json({"memory_bytes": shown, "by_recompute": kept}),
        "lines": write_lines(page, "memory"),
    }


def _find_device(page: Page) -> Device | None:
    from flopcalc.hardware.devices import find_device

    return find_device(page.fields["device"]) if "device" in page.fields else None


def _find_memory(page: Page) -> tuple[SetupEstimate, Memory]:
    """A step's memory: it needs no device, nor a peak of one."""
    from flopcalc.prediction.execution_options import choose_execution, find_kernel, settle_estimate
    from flopcalc.prediction.memory.peak import predict_memory

    setup, counted = count_page(page, "predict", "hardware")
    estimate, device = counted.estimate, _find_device(page)
    execution = choose_execution(setup.get("execution"), setup.get("compile", False))
    kernel: str = "sdpa" if setup.attention_kernel == "auto" else setup.attention_kernel
    kind = setup.formats.compute or estimate.terms[0].estimator.formats.attention
    if device is not None and kind in device.peak_tflops:
        picked = find_kernel(device, kind, setup.attention_kernel)
        is_asked = setup.attention_kernel != "auto"
        estimate, kernel, _ = settle_estimate(estimate, picked, execution, is_asked=is_asked)
    settings: dict[str, Any] = {
        "dtype": setup.formats.compute,
        "optimizer": setup.get("optimizer", "adamw"),
        "attention": kernel,
        "execution": execution,
        "is_adding": sum(term.times for term in estimate.terms) > 1,
    }
    found = [predict_memory(estimator, load, **settings) for estimator, load, _ in estimate.terms]
    return counted, max(found, key=lambda memory: memory.peak)


def _find_largest(page: Page, field: str) -> int | None:
    """The largest value of a field (batch, seq) whose step fits on the device, 0 if none; None where none is known."""
    device = _find_device(page)
    if device is None or device.memory_gb is None or set(_FIXED[field]) & page.fields.keys():
        return None

    def fits(value: int) -> bool:
        try:
            return _find_memory(page.set(**{field: str(value)}))[1].fits(device)
        except FlopcalcError:  # longer than the model takes, or more than can be counted
            return False

    unit = 1 if field == "batch" else _UNIT_SEQ
    low, high = 0, unit
    while high <= _MOST_LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > unit:
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _answer_curve(page: Page, over: str, of: str) -> Answer:
    """FLOPs, seconds or bytes of a step over its length, batch, images or GPUs; what cannot be is left out."""
    from flopcalc.api import predict_counted

    check_word(over, tuple(_CURVES), "curve", FlopcalcError)
    check_word(of, ("flops", "time", "memory"), "figure of a curve", FlopcalcError)
    points, problem = [], ""
    for value in _CURVES[over]:
        own = _move(page, over, value)
        try:
            if of == "flops":
                found: float = count_page(own)[1].estimate.flops.total
            elif of == "memory":
                found = _find_memory(own)[1].peak
            else:
                setup, counted, _ = _count_step(own)
                found = predict_counted(
                    counted, setup.replace(values={**setup.values, "advise": False, "memory": False})
                ).step_time_s.mid
        except FlopcalcError as error:  # as a length that the model cannot take
            problem = problem or str(error)
            continue
        points.append({"x": value, "y": found})
    if not points:
        raise FlopcalcError(problem)
    return {"what": "curve", "over": over, "of": of, "points": points, "lines": write_lines(page, of)}


def _move(page: Page, over: str, value: int) -> Page:
    """The form with another length, batch, number of images or GPUs, and without what says the same."""
    if over == "images":
        images = page.fields.get("image", ()) or (_IMAGE,)
        fields = {name: each for name, each in page.fields.items() if name != "seq"}
        text = page.fields.get("text") or page.fields.get("seq", "")
        return page._replace(fields={**fields, "text": text, "image": images[:1] * value})
    dropped = {"seq": ("lengths", "text"), "batch": ("lengths",), "gpus": ("global_batch",)}[over]
    fields = {name: each for name, each in page.fields.items() if name not in dropped}
    return page._replace(fields={**fields, over: str(value)})


def _answer_roofline(page: Page) -> Answer:
    from flopcalc.prediction.roofline import make_roofline

    _, counted, settings = _count_step(page)
    del settings["optimizer"]
    shown = make_roofline(counted.estimate, **settings).to_dict()
    return {
        "what": "roofline",
        "roofline": shown,
        "json": format_json(shown),
        "notes": counted.all_notes,
        "lines": write_lines(page, "roofline"),
    }


def _answer_serving(page: Page) -> Answer:
    """The model behind a serving engine, as `flopcalc serving`."""
    from flopcalc.server.serve import serve_setup

    shown = serve_setup(make_page_setup(page, "serving")).to_dict()
    return {"what": "serving", "serving": shown, "json": format_json(shown), "lines": write_lines(page, "serving")}


def _answer_loads(page: Page) -> Answer:
    """The same deployment under other loads."""
    from flopcalc.server.serve import serve_setup

    rows = []
    for load in _LOADS:
        fields = {name: value for name, value in page.fields.items() if name != "rate"}
        own = page._replace(fields={**fields, "concurrency": str(load)})
        found = serve_setup(make_page_setup(own, "serving")).to_dict()
        if found["fits"]:
            rows.append({"concurrency": load, **{name: found[name] for name in ("ttft_s", "tpot_s", "tokens_per_s")}})
    return {"what": "loads", "rows": rows}


def _answer_plan(page: Page, progress: Progress | None) -> Answer:
    """The layouts of a training run, as `flopcalc plan`; `progress` is called with how many are timed."""
    from flopcalc.planning.plan import plan_setup

    setup = make_page_setup(page, "plan")
    found = plan_setup(setup.replace(values={**setup.values, "progress": progress}))
    shown = found.to_dict()
    front = {point.layout for point in found.find_front()}
    points = [
        {
            "step_time_s": point.step_time_s,
            "memory_bytes": point.memory_bytes,
            "layout": str(point.layout),
            "is_front": point.layout in front,
        }
        for point in _thin(found, front)
    ]
    return {
        "what": "plan",
        "plan": shown,
        "points": points,
        "json": format_json(shown),
        "lines": write_lines(page, "plan"),
    }


def _thin(found: Plan, front: set[Any]) -> list[Any]:
    """The plan's points; of very many, the front and an even share of the others."""
    points = list(found.points)
    step = -(-len(points) // _MOST_POINTS)
    return [point for at, point in enumerate(points) if at % step == 0 or point.layout in front]
