"""A ServingAnswer in, text out: what fits, latency with its interval, tokens per second, money."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopcalc.base.text_table import format_grid, wrap
from flopcalc.base.units import format_bytes, format_energy, format_seconds
from flopcalc.base.vocabulary import name_part
from flopcalc.server.serve import ServingAnswer

_LATENCIES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "e2e_s": "end to end"}
HEADERS = ["", "mean", "90 % interval", "p50", "p90", "p95", "p99"]
_RATES = {"tokens_per_s": "tokens/s", "tokens_per_s_per_gpu": "tokens/s per GPU", "power_w": "watts"}


def format_answer(found: ServingAnswer) -> str:
    """One deployment under one load, on one screen."""
    lines = [line for text in (describe_answer(found), *_list_room(found)) for line in wrap(text, rest="  ")] + [""]
    if found.times:
        lines += [format_grid(HEADERS, list_cells(found), keys=1), ""]
        lines += [line for text in list_rates(found) for line in wrap(text, rest="  ")]
        parts = ", ".join(f"{name_part(name)} {share:.0%}" for name, share in found.shares.items() if share >= 0.005)
        lines += wrap(f"time goes: {parts}", rest="  ")
        lines.append(f"MFU {found.use['mfu']:.1%}, bandwidth {found.use['bandwidth']:.0%}; evidence: {found.evidence}")
        lines += wrap(f"what helps most: {found.advice}", rest="  ")
        lines += _describe_objectives(found)
        lines += wrap(f"start it: {found.command}", rest="  ")
    for note in found.notes:
        lines += wrap(f"note: {note}", rest="  ")
    return "\n".join(lines)


def list_cells(found: ServingAnswer) -> list[list[str]]:
    """A row for each latency."""
    rows = []
    for key, name in _LATENCIES.items():
        if key in found.times:
            at = found.times[key]
            high = "unbounded" if at.high is None else format_seconds(at.high)
            shown = map(format_seconds, found.percentiles[key].values())
            rows.append([name, format_seconds(at.mid), f"{format_seconds(at.low)} … {high}", *shown])
    gaps = found.percentiles.get("itl_s")
    return [*rows, *([["between tokens", "", "", *map(format_seconds, gaps.values())]] if gaps else [])]


def list_rates(found: ServingAnswer) -> list[str]:
    """Tokens per second, watts, energy and money."""
    times = {name: found.times[key] for key, name in _RATES.items() if key in found.times}
    lines = [
        f"{name}: {_show(at.mid)}" + (f" ({_show(at.low)} … {_show(at.high or 0)})" if at.low != at.high else "")
        for name, at in times.items()
    ]
    if found.wh is not None:
        lines.append(f"energy: {format_energy(found.wh['per_million_output_tokens'])} per million output tokens")
    if found.usd is not None:
        lines.append(
            f"cost: ${_show_usd(found.usd['per_million_output_tokens'])} per million output tokens, "
            f"${found.usd['per_hour']:,.2f} an hour ({found.price})"
        )
    return lines


def list_rows(answers: Sequence[ServingAnswer]) -> tuple[list[dict[str, str | None]], list[list[str]]]:
    """Cells and notes of each answer; what is held is said once for a single deployment."""
    is_single = len({_place(each) for each in answers}) == 1
    return (
        [{"GPUs": None if is_single else f"{each.gpus:,}", **_make_cells(each)} for each in answers],
        [[*(_list_room(each) if is_single else ()), *each.notes] for each in answers],
    )


def _make_cells(found: ServingAnswer) -> dict[str, str | None]:
    """One row of a list by its headers."""
    cells: dict[str, str | None] = {}
    for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "end to end")):
        at = found.times.get(key)
        cells[name] = None if at is None else "unbounded" if at.high is None else format_seconds(at.mid)
    for key, name in (("tokens_per_s", "tokens/s"), ("tokens_per_s_per_gpu", "per GPU")):
        cells[name] = _show(found.times[key].mid) if key in found.times else None
    cells["$ per 1M output"] = None if found.usd is None else _show_usd(found.usd["per_million_output_tokens"])
    if found.objectives is not None:
        is_met = all(found.objectives[key]["met"] for key in ("ttft_s", "itl_s") if key in found.objectives)
        cells["objectives"] = "met" if is_met else "missed"
        cells["GPUs needed"] = f"{found.objectives['gpus_needed'] or 'none'}"
    return cells


def format_audit(path: str, found: Sequence[dict[str, Any]]) -> str:
    """Rows that break physics, one line each."""
    marked = [row for row in found if row["faults"]]
    unread = sum(row["least_tpot_s"] is None for row in found)
    more = f", {unread:,} not checked" if unread else ""
    lines = [f"{path}: {len(found):,} row{'s' if found[1:] else ''}, {len(marked) - unread:,} marked{more}"]
    return "\n".join([*lines, *(f"line {row['line']}, {row['model']}: {'; '.join(row['faults'])}" for row in marked)])


def _describe_objectives(found: ServingAnswer) -> list[str]:
    if found.objectives is None:
        return []
    lines = []
    many = "most_users" if found.traffic.users else "most_load"
    unit = "users" if found.traffic.users else "requests in flight" if found.traffic.rate is None else "requests/s"
    for key, name in (("ttft_s", "time to first token"), ("itl_s", "between tokens")):
        if key in found.objectives:
            each = found.objectives[key]
            state = "met" if each["met"] else "missed"
            value = "-" if each["value_s"] is None else format_seconds(each["value_s"])
            lines.append(f"objective, {name} {format_seconds(each['limit_s'])} at {each['at']}: {state} ({value}); "
                         f"holds up to {_show(each[many])} {unit}")  # fmt: skip
    needed, users = found.objectives["gpus_needed"], found.objectives.get("most_users")
    most = f" ({found.gpus} GPU{'s take' if found.gpus > 1 else ' takes'} {users:,} users)" if users is not None else ""
    means = " (by each request's own mean between tokens)" if "itl_s" in found.objectives else ""
    lines.append(f"goodput: {found.objectives['goodput_tokens_per_s']:,.0f} tokens/s{means}; GPUs for this load: "
                 f"{needed or 'no number of copies meets the objectives'}{most}")  # fmt: skip
    return [line for text in lines for line in wrap(text, rest="  ")]


def _show_usd(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def _show(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def describe_list(answers: Sequence[ServingAnswer]) -> str:
    """What all answers of a list have in common."""
    loads = {(each.traffic.rate, each.traffic.users or each.traffic.concurrency) for each in answers}
    return describe_answer(answers[0], len({_place(each) for each in answers}) == 1, len(loads) == 1)


def _place(found: ServingAnswer) -> str:
    layout = found.layout
    degrees = " ".join(f"{name} {degree}" for name, degree in layout._asdict().items() if degree > 1) or "one GPU"
    return f" on {found.gpus} × {found.device.name} ({degrees})"


def describe_answer(found: ServingAnswer, has_place: bool = True, has_load: bool = True) -> str:
    """What is served where, under which load."""
    traffic, version = found.traffic, f" {found.engine.version}" if found.engine.version else ""
    where = f"{found.model}, {found.engine.name}{version}{_place(found) if has_place else ''}"
    if traffic.requests:
        return f"{where}: {len(traffic.requests):,} requests of a file"
    lengths = f"{where}: {traffic.input} tokens in, {traffic.output} out"
    if any(traffic.workers):
        lengths += f", {traffic.workers[0]} workers for prompts, {traffic.workers[1]} for decodes"
    if not has_load:
        return lengths
    many = f"{traffic.users:,} users" if traffic.users else f"concurrency {traffic.concurrency or 0:,}"
    return f"{lengths}, {many if traffic.rate is None else f'{traffic.rate:g} requests/s'}"


def _list_room(found: ServingAnswer) -> list[str]:
    room = found.room
    kinds = ", ".join(
        f"{kind} {format_bytes(round(size))} a {'sequence' if kind == 'state' else 'token'}"
        for kind, size in room.by_kind.items()
    )
    return [
        f"memory of a GPU: {format_bytes(round(room.total))}, weights {format_bytes(round(room.weights))}, "
        f"KV cache {format_bytes(max(0, round(room.cache)))} ({kinds})",
        f"the cache of a rank holds {room.tokens:,} tokens in {room.blocks:,} blocks of {room.block_size}: "
        f"{room.max_concurrency:,} requests of this length; the longest context is {found.longest:,} tokens",
    ]
