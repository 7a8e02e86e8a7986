"""A Prediction in, text out: time, shares, where the time goes, memory and notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flopcalc.base.spelling import spell
from flopcalc.base.text_table import format_grid, format_text, wrap
from flopcalc.base.units import format_bytes, format_energy, format_mass, format_money, format_seconds, format_share
from flopcalc.base.vocabulary import name_part
from flopcalc.hardware.devices import Device, find_device
from flopcalc.prediction.memory.peak import MOMENTS, Memory, find_capacity
from flopcalc.prediction.roofline import format_rate
from flopcalc.prediction.step import Prediction
from flopcalc.prediction.watts import Energy, Range

_LEAST = 0.0005  # of a step: rows that would read 0.0 % are left out


def format_prediction(
    prediction: Prediction,
    count: int,
    memory_device: str | None = None,
    *,
    kept: Mapping[str, int] | None = None,
    largest: int | None = None,
) -> str:
    """The readable report, with `count` modules.

    With `memory_device` it shows what fills that device's memory: `kept` is bytes of activations with and without
    recomputation, `largest` the largest batch that fits.
    """
    notes = list(prediction.notes)
    seconds = prediction.step_time_s
    interval = f"{format_seconds(seconds.low)} to {format_seconds(seconds.high)}"
    shares = f"{_percent(prediction.mfu)}   HFU {_percent(prediction.hfu)}   {prediction.describe_rate()}"
    times = [
        [name_part(name), format_seconds(value), _percent(value / seconds.mid)]
        for name, value in prediction.breakdown.items()
        if value >= _LEAST * seconds.mid
    ]
    total = sum(prediction.modules.values())
    modules = [[name, format_seconds(value), _percent(value / total)] for name, value in prediction.modules.items()]
    rest = sum(list(prediction.modules.values())[count:])
    modules = modules[:count] + ([["all others", format_seconds(rest), _percent(rest / total)]] if rest else [])
    price, (low, mid, high) = prediction.price, map(format_money, prediction.usd or (0.0, 0.0, 0.0))
    each = "million tokens" if prediction.tokens_per_s else prediction.sample.removesuffix("s")
    cost = price and f"{mid} ({low} to {high}) per {each}; {price.usd_per_gpu_hour:g} USD per GPU-hour, {price.source}"
    lines = [
        *wrap(
            f"{format_seconds(seconds.mid)}   ({interval})   bound by the {prediction.bound}", "step      ", " " * 10
        ),
        f"execution {prediction.execution}" + (f", routing {prediction.routing}" if prediction.routing else ""),
        *(
            wrap(f"{prediction.optimizer}, {prediction.memory.describe_parameter()}", "optimizer ", " " * 10)
            if prediction.optimizer and prediction.memory
            else []
        ),
        f"evidence  {prediction.evidence['class']}",
        *wrap(shares, "MFU       ", " " * 10),
        *wrap(str(prediction.floors), "floors    ", " " * 10),
        *format_energy_lines(prediction.energy, "per step"),
        *(wrap(cost, "cost      ", " " * 10) if cost else []),
        "",
        format_grid(["where the time goes", "time", "share"], times, keys=1),
        "",
        format_grid(["module, on the device", "time", "share"], modules, keys=1),
    ]
    if memory_device is not None and prediction.memory is not None:
        lines += ["", format_memory(prediction.memory, memory_device)]
        if kept is not None:
            none, full = (format_bytes(kept[word]) for word in ("none", "full"))
            lines += wrap(
                f"activations kept: {none} without recomputation, {full} with {spell('recompute', 'full')}", "", "  "
            )
        if largest is not None:
            lines.append(f"largest batch that fits: {largest or 'none'}")
        notes += [f"memory: {note}" for note in prediction.memory.notes if note not in notes]
    lines += ["", format_text(f"helps most: {prediction.advice}", "", "  ")]
    lines += [format_text(f"note: {note}", "", "  ") for note in notes]
    return "\n".join(lines)


def format_energy_lines(energy: Energy | None, span: str, label: int = 10) -> list[str]:
    """Watts of a GPU, watt-hours of a step or run, and of a million tokens; CO2 where the grid is known."""
    if energy is None:
        return []

    def show(values: Range, format_: Callable[[float], str]) -> str:
        return f"{format_(values.mid)} ({format_(values.low)} to {format_(values.high)})"

    watts = show(energy.power.watts, lambda value: f"{value:,.0f} W")
    parts = [f"{watts} a GPU", f"{show(energy.wh, format_energy)} {span}"]
    if energy.tokens:
        parts.append(f"{show(energy.wh_per_million_tokens, format_energy)} per million tokens")
    parts += [f"with a PUE of {energy.pue:g}"] if energy.pue != 1 else []
    lines = wrap("; ".join(parts), f"{'power':{label}}", " " * label)
    if (co2 := energy.co2_g) is not None:
        shown = f"{show(co2, format_mass)} {span} at {energy.grid_g_per_kwh:g} g/kWh"
        lines += wrap(shown, f"{'CO2':{label}}", " " * label)
    return lines


def make_cells(prediction: Prediction, largest: int | None) -> dict[str, str | None]:
    """A row of a table of predictions."""
    fit = " ✗" if prediction.fits is False else ""
    most = prediction.floors.tokens_per_s if prediction.floors else None
    return {
        "step": format_seconds(prediction.step_time_s.mid),
        "bound": prediction.bound,
        "MFU": _percent(prediction.mfu),
        f"{prediction.rate[1]}/s": format_rate(prediction.rate[0]),
        "at most": format_rate(most) if most is not None else None,
        "memory": None if prediction.memory is None else f"{format_bytes(prediction.memory.peak)}{fit}",
        "max batch": None if largest is None else str(largest),
    }


def format_memory(memory: Memory, device: str | Device | None = None) -> str:
    """A plain table: the most of each kind, what is there at the peak, and whether it fits."""
    lines = [f"{'':12}  {'most':>12}  {'at the peak':>12}  {'share':>7}"]
    for kind, there in memory.at_peak.items():
        most = getattr(memory, kind)
        if most or there:
            shown = format_bytes(there) if there else "-"
            share = format_share(there, memory.peak)
            lines.append(f"{kind.replace('_', ' '):12}  {format_bytes(most):>12}  {shown:>12}  {share:>7}")
    lines += wrap(f"in {MOMENTS[memory.moment]}", f"{'peak':12}  {'':12}  {format_bytes(memory.peak):>12}  ", " " * 12)
    if device is not None:
        known = find_device(device) if isinstance(device, str) else device
        if known.memory_gb is None:
            return "\n".join([*lines, *wrap(f"{known.name}: its memory is not known, so nor is whether this fits")])
        capacity = find_capacity(known)
        words = "fits" if memory.peak <= capacity else f"too much by {format_bytes(memory.peak - capacity)}"
        fit = f"{known.name}: {words}; {format_bytes(capacity)} for tensors, {known.memory_gb:g} GB in all"
        lines += wrap(fit, "", "  ")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
