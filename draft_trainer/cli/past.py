"""Rates, means and lengths out of a trainer's history. None where there was nothing to divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from slipstream.v1 import draft_trainer_pb2 as pb

DASH = "\N{EN DASH}"
"""Where there is no number: no drafts is not an acceptance length of 1."""


def length(drafts: int, accepted: int) -> float | None:
    """Acceptance length, bonus token included."""
    return 1 + accepted / drafts if drafts else None


def lengths(snapshots: Sequence[pb.TrainerStatus]) -> list[float | None]:
    """Acceptance length of the fleet in the minute before each snapshot."""
    return [
        length(
            sum(d.drafts for d in s.last_minute),
            sum(sum(d.accepted_per_position) for d in s.last_minute),
        )
        for s in snapshots
    ]


def losses(snapshots: Sequence[pb.TrainerStatus]) -> list[float | None]:
    """Training loss of the last step before each snapshot."""
    return [s.loss if s.HasField("loss") else None for s in snapshots]


def rates(
    snapshots: Sequence[pb.TrainerStatus], count: Callable[[pb.TrainerStatus], int]
) -> list[float | None]:
    """Growth of a counter per second between one snapshot and the next."""
    return [
        (count(b) - count(a)) / (b.time - a.time) if b.time > a.time else None
        for a, b in pairwise(snapshots)
    ]


def rate(
    snapshots: Sequence[pb.TrainerStatus], count: Callable[[pb.TrainerStatus], int]
) -> float | None:
    """Growth of a counter per second over the last minute: training and ingest come in bursts."""
    recent = [
        m
        for m in snapshots
        if m.time >= snapshots[-1].time - 60.0 and m.started_at == snapshots[-1].started_at
    ]
    return rates([recent[0], recent[-1]], count)[0] if len(recent) > 1 else None


def number(value: float | None, form: str = ".3f") -> str:
    """As text, or a dash."""
    return DASH if value is None else format(value, form)


def per_position(drafts: int, accepted: Sequence[int]) -> list[float]:
    """Share of drafts accepted at each position; empty where there were no drafts."""
    return [count / drafts for count in accepted] if drafts else []


def share(value: float) -> str:
    """A share in [0, 1] in three characters: .92, 1.0."""
    text = f"{value:.2f}"
    return text[1:] if text.startswith("0") else "1.0"


def duration(seconds: float) -> str:
    """45 s, 12:03, 3:12:03, 2 d 3 h."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"
