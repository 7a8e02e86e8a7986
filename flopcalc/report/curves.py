"""Curves over a list of values, drawn into an image file (needs matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from flopcalc.data import describe_install
from flopcalc.errors import FlopcalcError, format_value


def draw_curves(path: str, lines: Mapping[str, Sequence[tuple[int | str, float]]], x_label: str, y_label: str) -> None:
    """One line per name, over its points; a line without a name gets no legend."""
    if not os.path.splitext(path)[1]:
        raise FlopcalcError(f"plot {format_value(path)}: give a file name that ends in .png, .svg or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FlopcalcError(f"a plot needs matplotlib: {describe_install('plot')}") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", ms=4, label=name or None)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    if any(lines):
        axes.legend()
    try:
        figure.savefig(path)
    except ValueError as error:  # a kind of file that matplotlib does not know
        raise FlopcalcError(f"{path}: {error}") from None
    except OSError as error:
        raise FlopcalcError(f"{path}: cannot be written: {error.strerror or error}") from None
