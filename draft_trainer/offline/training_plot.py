"""Draws a fit's log as one SVG: estimated acceptance length and loss against tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from draft_trainer.durable import written_whole

Point = tuple[float, float]
_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 26, 34, 44
_COLOURS = ("#1f5fa8", "#b8500f", "#3a7d34", "#7d3a7a", "#8a6d00", "#4a4a4a")
_MOST_POINTS = 400


def draw(events: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture. Raises OSError.

    Args:
        events: of ``training_log.read_log``.
        path: of the SVG.
    """
    steps = [e for e in events if e["event"] == "step" and e["loss"] is not None]
    lengths = [(e["tokens"], e["acceptance_length"]) for e in events if e["event"] == "evaluation"]
    depth = len(steps[0]["step_acceptance"]) if steps else 0
    per_step = {
        f"TTT step {i}": _smooth(
            [
                (e["tokens"], e["step_acceptance"][i])
                for e in steps
                if e["step_acceptance"][i] is not None
            ]
        )
        for i in range(depth)
    }
    panels = [
        _panel("Estimated acceptance length, held out", {"": lengths}, marks=True),
        _panel("Expected acceptance per step, training", per_step),
        _panel("Loss, training", {"": _smooth([(e["tokens"], e["loss"]) for e in steps])}),
    ]
    body = "".join(
        f'<g transform="translate({i * _WIDTH} 0)">{panel}</g>' for i, panel in enumerate(panels)
    )
    width = _WIDTH * len(panels)
    with written_whole(path) as temporary:
        temporary.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
            f'width="{width}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
        )


def _panel(title: str, lines: dict[str, list[Point]], marks: bool = False) -> str:
    """One diagram.

    Args:
        title: above it.
        lines: points of every line by its name in the legend.
        marks: draw the points as well.
    """
    parts = [_text(_WIDTH / 2, 20, title, "middle", 'font-weight="bold"')]
    points = [point for line in lines.values() for point in line]
    if not points:
        return "".join([*parts, _text(_WIDTH / 2, _HEIGHT / 2, "nothing logged", "middle")])
    x_ticks = _ticks(0.0, max(x for x, _ in points))
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))

    def place(x: float, y: float) -> Point:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    for tick in y_ticks:
        x, y = place(x_ticks[0], tick)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(x - 6, y + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        x, y = place(tick, y_ticks[0])
        parts.append(_text(x, y + 17, _tokens(tick), "middle"))
    parts.append(_text(_WIDTH / 2, _HEIGHT - 8, "tokens trained on", "middle"))
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if marks:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed
            ]
        if name:
            where = _HEIGHT - _BOTTOM - 14 * (len(lines) - number) + 6
            parts.append(_text(_WIDTH - _RIGHT - 4, where, name, "end", f'fill="{colour}"'))
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose both, about five of them."""
    span = high - low or max(abs(high), 1.0)
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= span / 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * i, 12) for i in range(first, max(last, first + 1) + 1)]


def _smooth(line: list[Point]) -> list[Point]:
    """Means of neighbours, so that a long run stays one readable line."""
    size = max(math.ceil(len(line) / _MOST_POINTS), 1)
    parts = [line[i : i + size] for i in range(0, len(line), size)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def _tokens(count: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g}"


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
