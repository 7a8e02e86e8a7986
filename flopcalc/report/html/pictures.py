"""Pictures as SVG, drawn for a wide and for a narrow window: treemap, bars, stacked bar, points, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from flopcalc.report.html.page import PALETTE, Html, element, join
from flopcalc.report.html.treemap import Box, Leaf, arrange

WIDTHS = {"wide": 960, "narrow": 360}
_LETTER = 6.7  # mean width of a letter of 12 px
_MOST_POINTS = 400  # of a curve: neighbours are averaged


class Bar(NamedTuple):
    """A value, how it is written, and perhaps the interval around it, or the parts that add up to it."""

    label: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None
    parts: tuple[float, ...] = ()  # a colour each


def picture(title: str, draw: Callable[[int], tuple[int, Html]], caption: object = "") -> Html:
    """A figure from a function that gives the height and the shapes for a width."""
    versions = []
    for name, width in WIDTHS.items():
        height, shapes = draw(width)
        versions.append(
            element(
                "svg",
                element("title", title),
                shapes,
                class_=name,
                viewBox=f"0 0 {width} {height}",
                role="img",
                aria_label=title,
            )
        )
    return element("figure", *versions, *([element("figcaption", caption)] if caption else []))


def draw_treemap(title: str, leaves: Sequence[Leaf], describe: Callable[[Leaf], str], caption: object = "") -> Html:
    """A box for every leaf, as large as its value; `describe` is its tooltip."""

    def draw(width: int) -> tuple[int, Html]:
        height = 420
        groups, tiles = arrange(leaves, Box(0, 0, width, height))
        shapes = []
        for tile in tiles:
            box = tile.box
            tip = element("title", describe(tile.leaf))
            shapes.append(
                element("g", tip, _rectangle(box, class_=f"c{tile.group % len(PALETTE)}"), *_label(tile.label, box))
            )
            shapes.append(_rectangle(box, class_="edge", stroke_width=1))
        shapes += [_rectangle(group.box, class_="edge", stroke_width=4) for group in groups]
        return height, join(shapes)

    return picture(title, draw, caption)


def draw_bars(title: str, bars: Sequence[Bar], caption: object = "") -> Html:
    """A bar below each label; an interval is a line with ends."""
    most = max((bar.high or bar.value for bar in bars), default=0.0) or 1.0

    def draw(width: int) -> tuple[int, Html]:
        shapes = []
        for at, bar in enumerate(bars):
            y, scale = 44 * at, (width - 2) / most
            label = _shorten(bar.label, width - _LETTER * len(bar.text) - 12)
            shapes += [
                _text(label, 0, y + 14),
                _text(bar.text, width, y + 14, anchor="end"),
                element("g", element("title", f"{bar.label}: {bar.text}"), *_draw_parts(bar, y + 20, scale)),
            ]
            if bar.low is not None and bar.high is not None:
                low, high = _round(bar.low * scale), _round(bar.high * scale)
                path = f"M{low} {y + 27}H{high}M{low} {y + 21}v12M{high} {y + 21}v12"
                shapes.append(element("path", d=path, class_="mark"))
        return max(44 * len(bars), 1), join(shapes)

    return picture(title, draw, caption)


def _draw_parts(bar: Bar, y: float, scale: float) -> list[Html]:
    x, shapes = 0.0, []
    for at, part in enumerate(bar.parts or (bar.value,)):
        width = part * scale if bar.parts else max(part * scale, 1)
        shapes.append(_rectangle(Box(x, y, width, 14), class_=f"c{at % len(PALETTE)}"))
        x += width
    return shapes


def draw_stack(title: str, parts: Sequence[Bar], limit: Bar | None, caption: object = "") -> Html:
    """Parts side by side in one bar, and a line at the limit."""
    total = sum(part.value for part in parts)
    most = max(total, limit.value if limit else 0) * 1.01 or 1.0

    def draw(width: int) -> tuple[int, Html]:
        x, scale, shapes = 0.0, width / most, []
        for at, part in enumerate(parts):
            box = Box(x, 22, part.value * scale, 40)
            tip = element("title", f"{part.label}: {part.text}")
            shapes.append(
                element(
                    "g",
                    tip,
                    _rectangle(box, class_=f"c{at % len(PALETTE)}"),
                    *_label(part.label, box),
                    _rectangle(box, class_="edge", stroke_width=1),
                )
            )
            x += box.width
        if limit is not None:
            at_limit = limit.value * scale
            is_left = at_limit > width / 2
            shapes += [
                element("path", d=f"M{_round(at_limit)} 4V70", class_="mark dash"),
                _text(
                    f"{limit.label} {limit.text}",
                    at_limit + (-6 if is_left else 6),
                    14,
                    anchor="end" if is_left else "start",
                ),
            ]
        return 72, join(shapes)

    return picture(title, draw, caption)


class Spot(NamedTuple):
    """A point with a tooltip."""

    x: float
    y: float
    text: str


def draw_points(
    title: str,
    points: Sequence[tuple[float, float]],
    front: Sequence[Spot],
    *,
    x_label: str,
    y_label: str,
    limit: Bar | None = None,
    caption: object = "",
) -> Html:
    """All points as dots, the front of them joined by a line; y is logarithmic."""
    xs = [x for x, _ in points] + [spot.x for spot in front] + ([limit.value] if limit else [])
    ys = [y for _, y in points] + [spot.y for spot in front]

    def draw(width: int) -> tuple[int, Html]:
        plot = _Plot(width, 380, (0.0, max(xs) * 1.04), (min(ys) / 1.05, max(ys) * 1.08), is_log=True)
        # Dots in the same pixel are one.
        dots = dict.fromkeys(plot.place(x, y) for x, y in points)
        shapes = [*plot.draw_axes(x_label, y_label)]
        if dots:
            shapes.append(element("path", d="".join(f"M{x:.0f} {y:.0f}h0" for x, y in dots), class_="dots l0"))
        places = [plot.place(spot.x, spot.y) for spot in front]
        shapes.append(element("path", d="M" + "L".join(f"{x} {y}" for x, y in places), class_="curve l1"))
        shapes += [
            element("circle", element("title", spot.text), cx=x, cy=y, r=4, class_="c1")
            for spot, (x, y) in zip(front, places, strict=True)
        ]
        if limit is not None:
            x, _ = plot.place(limit.value, ys[0])
            shapes += [
                element("path", d=f"M{x} {plot.top}V{plot.bottom}", class_="mark dash"),
                _text(f"{limit.label} {limit.text}", x - 6, plot.top + 12, anchor="end"),
            ]
        return plot.height, join(shapes)

    return picture(title, draw, caption)


def draw_curves(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float | None]]],
    *,
    x_label: str,
    y_label: str,
    caption: object = "",
) -> Html:
    """Lines over x from zero up; a value of None is a gap."""
    thinned = {name: thin(points) for name, points in curves.items()}
    xs = [x for points in thinned.values() for x, _ in points]
    ys = [y for points in thinned.values() for _, y in points if y is not None]

    def draw(width: int) -> tuple[int, Html]:
        plot = _Plot(width, 300, (min(xs), max(xs)), (min(0.0, *ys), max(ys) * 1.08 or 1.0), is_log=False)
        shapes = [*plot.draw_axes(x_label, y_label)]
        for at, points in enumerate(thinned.values()):
            colour = at % len(PALETTE)
            for run in _split(points):
                places = [plot.place(x, y) for x, y in run]
                if len(places) == 1:
                    shapes.append(element("circle", cx=places[0][0], cy=places[0][1], r=3, class_=f"c{colour}"))
                else:
                    path = "M" + "L".join(f"{x} {y}" for x, y in places)
                    shapes.append(element("path", d=path, class_=f"curve l{colour}"))
        return plot.height, join(shapes)

    return picture(title, draw, caption)


def _split(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Runs of points without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is not None:
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def thin(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most as many points as a window shows: neighbours are averaged, a group without any value stays a gap."""
    count = min(len(points), _MOST_POINTS)
    found: list[tuple[float, float | None]] = []
    for at in range(count):
        part = points[at * len(points) // count : (at + 1) * len(points) // count]
        known = [y for _, y in part if y is not None]
        found.append((sum(x for x, _ in part) / len(part), sum(known) / len(known) if known else None))
    return found


class _Plot:
    """The frame of a picture with two axes."""

    def __init__(
        self, width: int, height: int, xs: tuple[float, float], ys: tuple[float, float], *, is_log: bool
    ) -> None:
        self.width, self.height, self.is_log = width, height, is_log
        self.left, self.right, self.top, self.bottom = 56, width - 14, 24, height - 40
        self.xs = xs if xs[0] < xs[1] else (xs[0] - 0.5, xs[0] + 0.5)
        self.ys = ys

    def place(self, x: float, y: float) -> tuple[float, float]:
        read = math.log if self.is_log else float
        (x0, x1), (y0, y1) = self.xs, (read(end) for end in self.ys)
        left = self.left + (x - x0) / (x1 - x0) * (self.right - self.left)
        return _round(left), _round(self.bottom - (read(y) - y0) / (y1 - y0) * (self.bottom - self.top))

    def draw_axes(self, x_label: str, y_label: str) -> list[Html]:
        shapes = [_text(y_label, 0, 12, muted=True), _text(x_label, self.right, self.height - 4, "end", muted=True)]
        for value in find_ticks(*self.xs, most=8 if self.width > 500 else 4):
            x, _ = self.place(value, self.ys[1])
            shapes.append(_text(f"{value:,.6g}", x, self.bottom + 16, "middle", muted=True))
            shapes.append(element("path", d=f"M{x} {self.bottom}v4", class_="axis"))
        for value in find_ticks(*self.ys, most=6, is_log=self.is_log):
            _, y = self.place(self.xs[0], value)
            shapes.append(_text(f"{value:,.6g}", self.left - 6, y + 4, "end", muted=True))
            shapes.append(element("path", d=f"M{self.left} {y}H{self.right}", class_="axis"))
        shapes.append(element("path", d=f"M{self.left} {self.top}V{self.bottom}H{self.right}", class_="axis"))
        return shapes


def find_ticks(low: float, high: float, most: int, *, is_log: bool = False) -> list[float]:
    """Round numbers from low to high, at most `most`; on a logarithmic axis of a decade or more 1, 2, 5, 10 …"""
    if is_log and high / low >= 10:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1,)):
            ticks = [digit * 10.0**decade for decade in decades for digit in digits]
            found = [tick for tick in ticks if low <= tick <= high]
            if len(found) <= 2 * most:
                return found
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= most)
    return [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round(value: float) -> float:
    return round(value, 2)


def _rectangle(box: Box, **attributes: object) -> Html:
    x, y, width, height = map(_round, box)
    return element("rect", x=x, y=y, width=width, height=height, **attributes)


def _text(text: str, x: float, y: float, anchor: str = "start", *, muted: bool = False) -> Html:
    return element("text", text, x=_round(x), y=_round(y), text_anchor=anchor, class_="muted" if muted else None)


def _shorten(text: str, room: float) -> str:
    """As much of a text as a width holds."""
    letters = max(int(room / _LETTER), 0)
    return text if len(text) <= letters else f"{text[: letters - 1]}…" if letters > 3 else ""


def _label(text: str, box: Box) -> list[Html]:
    """A text inside a box, where it has the room for one."""
    shown = _shorten(text, box.width - 8) if box.height >= 18 else ""
    if not shown:
        return []
    return [element("text", shown, x=_round(box.x + 5), y=_round(box.y + 15), class_="on")]
