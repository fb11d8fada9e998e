"""The report of a warm-up: acceptance.json, a plot of it, and progress on the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from draft_trainer.files import written_whole
from slipstream.v1 import release_pb2

ACCEPTANCE_FILE, PLOT_FILE = "acceptance.json", "acceptance.png"
FLAT_DECISIONS, FLAT_SHARE = 8, 1 / 3
LINE_SECONDS = 60.0


@dataclass(frozen=True)
class Point:
    """A decision of the gate.

    Attributes:
        tokens: completion tokens trained on before it was seen, every pass counted; after a kill,
            without those since the decision before it.
        seconds: of the warm-up until then.
        acceptance_length: held out, of the better one of candidate and promoted draft.
        gain: of the candidate over the promoted draft.
        half_width: of the interval of ``gain``.
        passed: whether the candidate was better.
        judged_at: seconds since the epoch.
    """

    tokens: int
    seconds: float
    acceptance_length: float
    gain: float
    half_width: float
    passed: bool
    judged_at: float


class Report:
    """The record of what a warm-up has reached, kept in its folder over restarts. One thread.

    Args:
        folder: of acceptance.json.

    Attributes:
        tokens: trained on before this process.
        points: the gate's decisions, oldest first.
        first: acceptance length before training; None before the first decision.
        judged_at: when the newest decision was made, seconds since the epoch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / ACCEPTANCE_FILE
        known = json.loads(path.read_text()) if path.exists() else {}
        self.tokens: int = known.get("tokens", 0)
        self.points = [Point(**point) for point in known.get("decisions", ())]
        self.first: float | None = known.get("acceptance_length_at_start")
        self.judged_at = max((one.judged_at for one in self.points), default=0.0)
        self._before = known.get("seconds", 0.0)
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds of the warm-up, restarts included."""
        return float(self._before + time.monotonic() - self._began)

    @property
    def acceptance_length(self) -> float | None:
        """Return the promoted draft's, held out, as last measured; None before that."""
        return self.points[-1].acceptance_length if self.points else None

    @property
    def flat(self) -> bool:
        """Return whether the held-out acceptance length no longer rises: no candidate was better in
        the last third of all tokens, of ``FLAT_DECISIONS`` at least."""
        better = [number for number, one in enumerate(self.points) if one.passed]
        since = self.points[better[-1] + 1 :] if better else self.points
        if len(since) < FLAT_DECISIONS:
            return False
        last = self.points[better[-1]].tokens if better else 0
        return since[-1].tokens - last >= FLAT_SHARE * since[-1].tokens

    def add(self, verdicts: Sequence[release_pb2.Verdict], tokens: int) -> list[Point]:
        """Take the verdicts that are new and were measured; returns those that passed."""
        new = []
        for verdict in verdicts:
            if verdict.judged_at <= self.judged_at or not verdict.HasField("gate"):
                continue
            gate = verdict.gate
            lengths = (gate.incumbent_acceptance_length, gate.candidate_acceptance_length)
            if self.first is None:
                self.first = lengths[0]
            figures = (gate.difference, gate.difference_half_width, gate.passed)
            new.append(
                Point(tokens, self.seconds, lengths[gate.passed], *figures, verdict.judged_at)
            )
        self.judged_at = max([self.judged_at, *(one.judged_at for one in verdicts)])
        self.points += new
        return [one for one in new if one.passed]

    def write(self, tokens: int, finished: bool = False) -> None:
        """Replace acceptance.json. Raises OSError."""
        document = {
            "finished": finished,
            "tokens": tokens,
            "seconds": self.seconds,
            "acceptance_length_at_start": self.first,
            "acceptance_length": self.acceptance_length,
            "decisions": [asdict(point) for point in self.points],
        }
        with written_whole(self._folder / ACCEPTANCE_FILE) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")

    def draw(self) -> None:
        """Plot the acceptance length against the tokens. Raises OSError."""
        # Here, because ``--help`` need not wait for it.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        tokens = [0, *(point.tokens for point in self.points)]
        lengths = [self.first or 1.0, *(point.acceptance_length for point in self.points)]
        axes.plot(tokens, lengths, color="tab:blue")
        better = [point for point in self.points if point.passed]
        axes.plot(
            [point.tokens for point in better],
            [point.acceptance_length for point in better],
            "o",
            color="tab:blue",
            label="a better draft",
        )
        axes.set_xlabel("completion tokens trained on, every pass counted")
        axes.set_ylabel("acceptance length on held-out prompts")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        with written_whole(self._folder / PLOT_FILE) as temporary:
            figure.savefig(temporary, format="png", dpi=120)


def is_finished(folder: Path) -> bool:
    """Return whether a warm-up ended in this folder."""
    path = folder / ACCEPTANCE_FILE
    return path.exists() and bool(json.loads(path.read_text()).get("finished"))


class ProgressLine:
    """The progress: a bar on a terminal, else a line now and then, and one for each better draft.

    Args:
        console: where.
        bar: drawn there.
        before: tokens that were trained on before this process.
    """

    def __init__(self, console: Console, bar: Progress, before: int) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("starting", total=None)
        self._began, self._before = time.monotonic(), before
        self._said_at = self._began

    def show(self, tokens: int, total: int | None, length: float | None) -> None:
        """Say that ``tokens`` of ``total`` were trained on, which gave an acceptance length."""
        told = self._told(tokens, total)
        if length is not None:
            told += f", acceptance length {length:.3f}"
        self._bar.update(self._task, completed=tokens, total=total, description=told)
        if not self._console.is_terminal and time.monotonic() - self._said_at > LINE_SECONDS:
            self._say(told)

    def better(self, point: Point, total: int | None) -> None:
        """Print a line about a draft that passed the gate."""
        self._say(
            f"{self._told(point.tokens, total)}: acceptance length {point.acceptance_length:.3f} "
            f"on held-out prompts, {point.gain:+.3f} ± {point.half_width:.3f}"
        )

    def _told(self, tokens: int, total: int | None) -> str:
        rate = max(tokens - self._before, 0) / max(time.monotonic() - self._began, 1e-9)
        told = f"{tokens:,} tokens, {rate:,.0f} a second"
        if total is not None and rate:
            told += f", {timedelta(seconds=round(max(total - tokens, 0) / rate))} left"
        return told

    def _say(self, text: str) -> None:
        say(self._console, text)
        self._said_at = time.monotonic()


@contextmanager
def progress_line(console: Console, before: int) -> Iterator[ProgressLine]:
    """Show progress for the length of a ``with`` block."""
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield ProgressLine(console, bar, before)


def say(console: Console, text: str) -> None:
    """Print one line as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
