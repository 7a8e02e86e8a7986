"""The page's door into Python: a question as JSON in, its answer or a one-line error as JSON out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flopcalc.base.errors import DeviceError, FlopcalcError, format_value
from flopcalc.base.files import format_json, parse_json
from flopcalc.base.spelling import spell_option, use_spelling
from flopcalc.base.vocabulary import CONVENTIONS
from flopcalc.setup.counting import SetupEstimate, find_shares
from flopcalc.setup.setup import Setup
from flopcalc.web.setups import Page, count_page, make_page_setup, read_page, write_lines

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
    known: dict[object, Callable[[Page], Answer]] = {
        "flops": _answer_flops, "export": _answer_export, "conventions": _answer_conventions,
        "translate": _answer_translate, "time": _answer_time, "memory": _answer_memory, "roofline": _answer_roofline,
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
        "lines": write_lines(page, "flops"),
    }


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
    return setup, counted, list_step_options(setup)


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
    """What fills the memory, and what would fit: the largest batch, with and without recomputation, by device."""
    from flopcalc.hardware.devices import load_devices
    from flopcalc.prediction.memory.peak import find_capacity
    from flopcalc.prediction.step import find_largest_batch, predict_estimate

    _, counted, settings = _count_step(page)
    found = predict_estimate(counted.estimate, advise=False, **settings)
    assert found.memory is not None  # it was asked for
    kept = {}
    estimator, load, _ = counted.estimate.terms[0]
    chosen = estimator.recipe.recompute
    for word in ("none", "full") if estimator.trains(load) else ():
        other, estimate = found, counted.estimate
        if word != chosen:
            estimate = count_page(page.set(recompute=word), "predict", "hardware")[1].estimate
            other = predict_estimate(estimate, advise=False, **settings)
        assert other.memory is not None
        kept[word] = {
            "activations": other.memory.activations,
            "peak": other.memory.peak,
            "fits": other.fits,
            "largest_batch": find_largest_batch(estimate, **settings),
        }
    own = kept.get(chosen)
    largest = own["largest_batch"] if own else find_largest_batch(counted.estimate, **settings)
    shown = {**found.to_dict()["memory_bytes"], "largest_batch": largest}
    devices = [
        {
            "id": device.id,
            "name": device.name,
            "capacity": find_capacity(device),
            "fits": found.memory.peak <= find_capacity(device),
        }
        for device in load_devices()[0]
        if device.memory_gb is not None
    ]
    return {
        "what": "memory",
        "memory": shown,
        "by_recompute": kept,
        "devices": devices,
        "notes": list(dict.fromkeys([*found.memory.notes, *counted.notes])),
        "json": format_json({"memory_bytes": shown, "by_recompute": kept}),
        "lines": write_lines(page, "memory"),
    }


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
