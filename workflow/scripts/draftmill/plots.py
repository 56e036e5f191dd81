"""Plots as inline SVG and HTML: text in, text out, no library and no network.

Knows scales, ticks and marks. Must never know what is plotted. Every name is escaped here. An SVG is drawn twice,
for a wide and for a narrow page, and CSS shows the one that fits, so that letters keep their size on a phone and
in print; a little script of the page (pages.py) adds the reading under the pointer.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

COLOURS = 8
"""Series colours that the page's style defines (`s0` to `s7`)."""


@dataclass(frozen=True)
class Size:
    """A drawing area in SVG units, which are CSS pixels at the width it is made for."""

    name: str
    width: int
    height: int
    left: int
    right: int = 12
    top: int = 26
    bottom: int = 40
    ticks: int = 8


WIDE = Size("wide", width=960, height=320, left=62)
NARROW = Size("narrow", width=370, height=270, left=50, ticks=4)


@dataclass(frozen=True)
class Series:
    """Values over the plot's x, None where nothing is known. `colour`: index into the page's colours."""

    name: str
    values: Sequence[float | None]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Band:
    """A stretch of x, shaded and named."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Mark:
    """A point of x with a name. `kind`: restart, part or limit (lines with a label), shard (a short tick)."""

    x: float
    kind: str
    name: str = ""


@dataclass(frozen=True)
class Axis:
    """How the numbers of an axis read: `label` beside it, `show` for one value, `ticks` from a range and count."""

    label: str
    show: Callable[[float], str]
    ticks: Callable[[float, float, int], list[float]]


def escape(text: str) -> str:
    """Text that is safe between tags and inside quoted attributes."""
    return html.escape(text, quote=True)


def nice_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 2.5, 5 × 10^n that gives at most `count` steps over `span`."""
    if span <= 0:
        return 1.0
    rough = span / max(1, count)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(
        factor * magnitude for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * magnitude >= rough * 0.999
    )


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from `low` to `high`."""
    step = nice_step(high - low, count)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A count or a rate as people read it: 0.25, 18, 1,436, 23.5k, 579M."""
    size = abs(value)
    for limit, divisor, letter in ((1e10, 1e9, "G"), (1e7, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            scaled = value / divisor
            return f"{scaled:,.0f}{letter}" if abs(scaled) >= 100 else f"{scaled:.3g}{letter}"
    return f"{value:,.0f}" if size >= 100 or value == int(value) else f"{value:.3g}"


def percent(value: float) -> str:
    """A share as per cent."""
    return f"{100 * value:.3g} %"


def counts(label: str) -> Axis:
    """An axis of plain numbers."""
    return Axis(label, number, nice_ticks)


def shares(label: str) -> Axis:
    """An axis of shares, shown as per cent."""
    return Axis(label, percent, nice_ticks)


def time_axis(longest_s: float) -> Axis:
    """An axis of seconds, shown in the unit that fits its length."""
    size, unit = next(
        (pair for pair in ((1.0, "s"), (60.0, "min")) if longest_s <= 180 * pair[0]), (3600.0, "h")
    )

    def ticks(low: float, high: float, count: int) -> list[float]:
        steps = (1, 2, 5, 10, 15, 20, 30, 60, 120) if size < 3600 else (0.25, 0.5, 1, 2, 4, 6, 12, 24, 48, 96)
        fits = (step for step in steps if (high - low) / size / step <= count)
        step = next(fits, nice_step((high - low) / size, count)) * size
        first = math.ceil(low / step - 1e-9)
        return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]

    return Axis(f"time at work ({unit})", lambda value: f"{value / size:.4g}", ticks)


@dataclass(frozen=True)
class Scale:
    """From data to the SVG units of one drawing."""

    size: Size
    x0: float
    x1: float
    y1: float

    def x(self, value: float) -> float:
        share = (value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.0
        return round(self.size.left + share * (self.size.width - self.size.right - self.size.left), 1)

    def y(self, value: float) -> float:
        height = self.size.height - self.size.bottom - self.size.top
        return round(self.size.top + height * (1.0 - value / self.y1), 1)

    @property
    def floor(self) -> float:
        return self.y(0.0)


def axes(scale: Scale, x_axis: Axis, y_axis: Axis) -> str:
    """Grid, tick labels and the names of both axes."""
    size, floor = scale.size, scale.floor
    right = size.width - size.right
    parts = []
    for value in y_axis.ticks(0.0, scale.y1, 5):
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{size.left} {y}H{right}"/>')
        parts.append(
            f'<text class="tick end" x="{size.left - 6}" y="{y + 4}">{escape(y_axis.show(value))}</text>'
        )
    for value in x_axis.ticks(scale.x0, scale.x1, size.ticks):
        x = scale.x(value)
        parts.append(f'<path class="axis" d="M{x} {floor}v4"/>')
        parts.append(
            f'<text class="tick middle" x="{x}" y="{floor + 17}">{escape(x_axis.show(value))}</text>'
        )
    parts.append(f'<path class="axis" d="M{size.left} {floor}H{right}"/>')
    parts.append(f'<text class="label" x="2" y="13">{escape(y_axis.label)}</text>')
    parts.append(f'<text class="label end" x="{right}" y="{floor + 34}">{escape(x_axis.label)}</text>')
    return "".join(parts)


def bands(scale: Scale, stretches: Sequence[Band]) -> str:
    """Shaded stretches; a name is written where it has room."""
    parts = []
    for band in stretches:
        start, end = scale.x(max(band.start, scale.x0)), scale.x(min(band.end, scale.x1))
        width = max(round(end - start, 1), 0.5)
        parts.append(
            f'<rect class="band {escape(band.name)}" x="{start}" y="{scale.size.top}" width="{width}" '
            f'height="{scale.floor - scale.size.top}"><title>{escape(band.name)}</title></rect>'
        )
        if width > 7 * len(band.name) and start > scale.size.left + 1:
            parts.append(
                f'<text class="note" x="{start + 3}" y="{scale.size.top - 5}">{escape(band.name)}</text>'
            )
    return "".join(parts)


def marks(scale: Scale, points: Sequence[Mark]) -> str:
    """Restarts, part borders and limits as lines with a label; shard borders as ticks under the axis."""
    parts = []
    top, floor = scale.size.top, scale.floor
    for mark in points:
        x = scale.x(mark.x)
        if mark.kind == "shard":
            parts.append(
                f'<path class="mark shard" d="M{x} {floor}v-7"><title>{escape(mark.name)}</title></path>'
            )
            continue
        parts.append(
            f'<path class="mark {escape(mark.kind)}" d="M{x} {top}V{floor}"><title>{escape(mark.name)}</title></path>'
        )
        if mark.kind == "restart":
            parts.append(
                f'<path class="flag" d="M{x - 4} {top - 7}h8l-4 7z"><title>{escape(mark.name)}</title></path>'
            )
        elif mark.name:
            late = x > scale.size.width * 0.7
            parts.append(
                f'<text class="note{" end" if late else ""}" x="{x - 4 if late else x + 4}" y="{top - 5}">'
                f"{escape(mark.name)}</text>"
            )
    return "".join(parts)


def line(scale: Scale, xs: Sequence[float], values: Sequence[float | None]) -> str:
    """Path data; a None breaks the line."""
    path, pen = [], "M"
    for x, value in zip(xs, values, strict=True):
        if value is None:
            pen = "M"
            continue
        path.append(f"{pen}{scale.x(x):g} {scale.y(min(value, scale.y1)):g}")
        pen = "L"
    return "".join(path)


def area(scale: Scale, xs: Sequence[float], low: Sequence[float], high: Sequence[float]) -> str:
    """Path data of the surface between two lines."""
    there = [f"{scale.x(x):g} {scale.y(value):g}" for x, value in zip(xs, high, strict=True)]
    back = [f"{scale.x(x):g} {scale.y(value):g}" for x, value in zip(xs, low, strict=True)]
    return "M" + "L".join(there) + "L" + "L".join(reversed(back)) + "Z"


def drawing(scale: Scale, title: str, content: str) -> str:
    """One SVG; `data-*` tell the page's script where the plot's area lies."""
    size = scale.size
    return (
        f'<svg class="{size.name}" viewBox="0 0 {size.width} {size.height}" role="img" aria-label="{escape(title)}" '
        f'data-left="{size.left}" data-right="{size.width - size.right}" data-top="{size.top}" '
        f'data-floor="{scale.floor:g}">{content}</svg>'
    )


def legend(series: Sequence[Series]) -> str:
    """Names beside their colours, above the plot."""
    if len(series) < 2:
        return ""
    keys = (
        f'<span class="key"><i class="s{one.colour}{" dashed" if one.dashed else ""}"></i>{escape(one.name)}</span>'
        for one in series
    )
    return f'<div class="legend">{"".join(keys)}</div>'


def readings(
    x0: float, x1: float, xs: Sequence[float], labels: Sequence[str], series: Sequence[Series], axis: Axis
) -> str:
    """What the page's script shows under the pointer, as JSON that cannot end its script element."""
    shown = [
        {
            "name": one.name,
            "colour": one.colour,
            "values": [None if value is None else axis.show(value) for value in one.values],
        }
        for one in series
    ]
    data = {"x0": x0, "x1": x1, "x": [round(x, 3) for x in xs], "labels": labels, "series": shown}
    text = orjson.dumps(data).decode().replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def figure(title: str, key: str, drawings: Sequence[str], data: str) -> str:
    """A plot with its title; the two drawings and the reading under the pointer."""
    return (
        f'<figure class="plot"><figcaption>{escape(title)}</figcaption>{key}'
        f'<div class="canvas">{"".join(drawings)}<output hidden></output></div>{data}</figure>'
    )


def top_of(values: Sequence[float], axis_count: int = 5) -> float:
    """A round number at or above the largest value."""
    largest = max(values, default=0.0)
    if largest <= 0:
        return 1.0
    step = nice_step(largest, axis_count)
    return math.ceil(largest / step - 1e-9) * step


def extent(xs: Sequence[float], stretches: Sequence[Band]) -> tuple[float, float]:
    """The range of a plot over time: the points and the bands around them."""
    low = min([*xs[:1], *(band.start for band in stretches)], default=0.0)
    high = max([*xs[-1:], *(band.end for band in stretches)], default=1.0)
    return low, high


def stacked_chart(
    title: str,
    xs: Sequence[float],
    series: Sequence[Series],
    y_axis: Axis,
    *,
    stretches: Sequence[Band] = (),
    points: Sequence[Mark] = (),
) -> str:
    """Areas on top of each other over time (s): the upper edge is the sum."""
    filled = [[value or 0.0 for value in one.values] for one in series]
    levels = [[0.0] * len(xs)]
    for values in filled:
        levels.append([below + value for below, value in zip(levels[-1], values, strict=True)])
    x0, x1 = extent(xs, stretches)
    x_axis = time_axis(x1 - x0)
    drawings = []
    for size in (WIDE, NARROW):
        scale = Scale(size, x0, x1, top_of(levels[-1]))
        content = bands(scale, stretches) + axes(scale, x_axis, y_axis)
        for index, one in enumerate(series):
            content += (
                f'<path class="area s{one.colour}" d="{area(scale, xs, levels[index], levels[index + 1])}"/>'
            )
        content += f'<path class="line total" d="{line(scale, xs, levels[-1])}"/>' + marks(scale, points)
        drawings.append(drawing(scale, title, content))
    total = [Series("together", levels[-1])] if len(series) > 1 else []
    labels = [f"{x_axis.show(x)} {x_axis.label.split('(')[-1].rstrip(')')}" for x in xs]
    return figure(title, legend(series), drawings, readings(x0, x1, xs, labels, [*series, *total], y_axis))


def line_chart(
    title: str,
    xs: Sequence[float],
    series: Sequence[Series],
    y_axis: Axis,
    *,
    stretches: Sequence[Band] = (),
    points: Sequence[Mark] = (),
    y_max: float | None = None,
) -> str:
    """Lines over time (s)."""
    known = [value for one in series for value in one.values if value is not None]
    x0, x1 = extent(xs, stretches)
    x_axis = time_axis(x1 - x0)
    drawings = []
    for size in (WIDE, NARROW):
        scale = Scale(size, x0, x1, y_max or top_of(known))
        content = bands(scale, stretches) + axes(scale, x_axis, y_axis)
        for one in series:
            dashed = " dashed" if one.dashed else ""
            content += f'<path class="line s{one.colour}{dashed}" d="{line(scale, xs, one.values)}"/>'
        drawings.append(drawing(scale, title, content + marks(scale, points)))
    labels = [f"{x_axis.show(x)} {x_axis.label.split('(')[-1].rstrip(')')}" for x in xs]
    return figure(title, legend(series), drawings, readings(x0, x1, xs, labels, series, y_axis))


def histogram(
    title: str,
    width: float,
    heights: Sequence[int],
    x_axis: Axis,
    y_axis: Axis,
    *,
    points: Sequence[Mark] = (),
    colour: int = 0,
) -> str:
    """Columns of equal `width`, the first from 0."""
    x1 = width * max(1, len(heights))
    drawings = []
    for size in (WIDE, NARROW):
        scale = Scale(size, 0.0, x1, top_of(heights))
        columns = "".join(
            f"M{scale.x(index * width):g} {scale.floor:g}V{scale.y(height):g}H{scale.x((index + 1) * width) - 1:g}V{scale.floor:g}Z"
            for index, height in enumerate(heights)
            if height
        )
        content = (
            axes(scale, x_axis, y_axis)
            + f'<path class="column s{colour}" d="{columns}"/>'
            + marks(scale, points)
        )
        drawings.append(drawing(scale, title, content))
    middles = [(index + 0.5) * width for index in range(len(heights))]
    labels = [f"{index * width:,.0f} to {(index + 1) * width:,.0f}" for index in range(len(heights))]
    data = readings(
        0.0,
        x1,
        middles,
        labels,
        [Series(y_axis.label, list(heights), colour)],
        Axis("", lambda v: f"{v:,.0f}", nice_ticks),
    )
    return figure(title, "", drawings, data)


def spans_chart(
    title: str, spans: Sequence[tuple[str, float, float]], longest_s: float, points: Sequence[Mark] = ()
) -> str:
    """One horizontal stroke per (name, start, end), in order of start: a shard's time at work."""
    ordered = sorted(spans, key=lambda span: span[1:])
    x_axis = time_axis(longest_s)
    drawings = []
    for size in (WIDE, NARROW):
        row = min(16.0, max(1.0, 560.0 / max(1, len(ordered))))
        height = int(size.top + size.bottom + row * len(ordered))
        tall = Size(size.name, size.width, height, 12, size.right, size.top, size.bottom, size.ticks)
        scale = Scale(tall, 0.0, longest_s or 1.0, 1.0)
        strokes = []
        for index, (name, start, end) in enumerate(ordered):
            y = round(tall.top + row * (index + 0.5), 1)
            stop = max(scale.x(end), scale.x(start) + 1)
            strokes.append(
                f'<path d="M{scale.x(start):g} {y:g}H{stop:g}"><title>{escape(name)}</title></path>'
            )
        thick = f'style="stroke-width:{max(0.7, row * 0.7):.2g}"'
        silent = Axis(
            f"{len(ordered)} shards, in order of start", lambda value: "", lambda low, high, count: []
        )
        content = (
            axes(scale, x_axis, silent)
            + f'<g class="span s0" {thick}>{"".join(strokes)}</g>'
            + marks(scale, points)
        )
        drawings.append(drawing(scale, title, content))
    return figure(title, "", drawings, "")


def bars(title: str, rows: Sequence[tuple[str, float, str]], colour: int = 0) -> str:
    """A table of (name, value, what to write beside it) with a bar for each; wraps by itself on a phone."""
    largest = max((value for _, value, _ in rows), default=0.0) or 1.0
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td><span class="bar s{colour}" style="width:{100 * value / largest:.4g}%">'
        f"</span></td><td>{escape(note)}</td></tr>"
        for name, value, note in rows
    )
    return (
        f'<figure class="plot bars"><figcaption>{escape(title)}</figcaption><table>{lines}</table></figure>'
    )


def stacks(title: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """One bar per row, split into shares that add up to 1; `names`: what each share is."""
    key = legend([Series(name, (), index) for index, name in enumerate(names)])
    lines = []
    for label, values in rows:
        pieces = "".join(
            f'<span class="s{index}" style="width:{100 * value:.4g}%" title="{escape(name)} {percent(value)}">'
            f"{percent(round(value, 2)) if value >= 0.08 else ''}</span>"
            for index, (name, value) in enumerate(zip(names, values, strict=True))
            if value > 0
        )
        lines.append(f'<div class="stack"><b>{escape(label)}</b><div>{pieces}</div></div>')
    return (
        f'<figure class="plot stacks"><figcaption>{escape(title)}</figcaption>{key}{"".join(lines)}</figure>'
    )
