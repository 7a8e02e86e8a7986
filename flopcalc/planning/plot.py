"""A plan as a picture: days, and money, over memory of every layout that fits (needs matplotlib)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flopcalc.errors import FlopcalcError
from flopcalc.files import read_path
from flopcalc.report.figures import check_ending, open_figure
from flopcalc.units import format_tokens

if TYPE_CHECKING:
    from flopcalc.planning.results import Plan


def plot(found: Plan, path: str | os.PathLike[str]) -> None:
    """Draw days over memory for every layout that fits, and the front that no other beats (needs matplotlib)."""
    path = read_path(path, "plot", FlopcalcError)
    check_ending(path)
    with open_figure(path) as figure:
        axes = figure.subplots()
        gib = 1 << 30
        days = found.tokens / (found.global_batch * found.seq) / 86400
        sizes, times = [size / gib for _, size, _ in found.points], [s * days for s, _, _ in found.points]
        axes.scatter(sizes, times, s=6, alpha=0.3, label=f"{found.fitting} layouts that fit")
        front = found.find_front()
        axes.plot(
            [size / gib for _, size, _ in front], [s * days for s, _, _ in front], "o-", ms=4, color="C3", label="front"
        )
        axes.set_xlabel("memory a device (GiB)")
        axes.set_ylabel(f"days for {format_tokens(found.tokens)}")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(f"{found.model} on {found.gpus} x {found.device.name}")
        if found.price is not None:
            rate = found.price.usd_per_gpu_hour * found.gpus * 24
            is_large = rate * days * max(found.points)[0] >= 1e6
            rate /= 1e6 if is_large else 1

            def to_money(days: Any) -> Any:
                return days * rate

            def to_days(money: Any) -> Any:
                return money / rate

            money = axes.secondary_yaxis("right", functions=(to_money, to_days))
            money.set_ylabel("million USD" if is_large else "USD")
            money.yaxis.set_major_formatter("{x:g}")
            money.yaxis.set_minor_formatter("{x:g}")
        axes.legend()
