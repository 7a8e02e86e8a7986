"""Pictures in image files (need matplotlib): a figure that is written once it is drawn, and curves over values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from flopcalc.base.data import describe_install
from flopcalc.base.errors import FlopcalcError, format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def open_figure(
    path: str | os.PathLike[str], width: float = 8, height: float = 5, error: type[FlopcalcError] = FlopcalcError
) -> Iterator[Figure]:
    """A figure to draw on; leaving it writes the file, of the kind that its name ends in."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise error(f"a plot needs matplotlib: {describe_install('plot')}") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    try:
        figure.savefig(path)
    except ValueError as problem:  # a kind of file that matplotlib does not know
        raise error(f"{os.fspath(path)}: cannot be written: {problem}") from None
    except OSError as problem:
        raise error(f"{os.fspath(path)}: cannot be written: {problem.strerror or problem}") from None


def check_ending(path: str) -> None:
    """An error for a file name that does not say its kind."""
    if not os.path.splitext(path)[1]:
        raise FlopcalcError(f"plot {format_value(path)}: give a file name that ends in .png, .svg or .pdf")


class CurvePoint(NamedTuple):
    """A point of a curve; one that does not fit in memory is drawn hollow."""

    x: float | str
    y: float
    fits: bool = True


def draw_curves(path: str, lines: Mapping[str, Sequence[CurvePoint]], x_label: str, y_label: str, title: str) -> None:
    """One line per name, over its points; a line without a name gets no legend."""
    check_ending(path)
    with open_figure(path) as figure:
        axes = figure.subplots()
        for name, points in lines.items():
            (line,) = axes.plot([point.x for point in points], [point.y for point in points], "o-", ms=4)
            line.set_label(name or "_")
            hollow = [point for point in points if not point.fits]
            axes.plot([p.x for p in hollow], [p.y for p in hollow], "o", ms=4, mfc="white", color=line.get_color())
        if any(not point.fits for points in lines.values() for point in points):
            axes.plot([], [], "o", ms=4, mfc="white", color="grey", label="does not fit in memory")
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
