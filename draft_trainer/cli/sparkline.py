"""A row of numbers as a row of characters."""

from __future__ import annotations

from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The newest ``width`` values between their lowest and their highest, right-aligned.

    None is a gap: nothing was measured there.
    """
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)

    def level(value: float | None) -> str:
        if value is None:
            return " "
        if high == low:
            return _LEVELS[3]
        return _LEVELS[min(7, int(8 * (value - low) / (high - low)))]

    return "".join(map(level, shown)).rjust(width)


def bar(share: float, width: int) -> str:
    """A share in [0, 1] as a bar of ``width`` characters, in eighths of one."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
