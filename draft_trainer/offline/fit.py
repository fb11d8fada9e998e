"""Trains a draft offline on recorded states and keeps it at its best estimated acceptance length.

A fit is a function of its inputs: the recording, the draft, the configuration and the number of
threads. Where it was killed it goes on from its newest training state, and ends with the bits that
it would have ended with.

What ``draft-trainer fit`` reads: TOML with the sections [fit] and [training].

What a fit trains on and what it is judged by, out of one recording.

The folder that a fit writes: a draft that vLLM loads, from its first instant to its last.

``config.json`` and ``model.safetensors`` are the best draft so far, ``training.jsonl`` is the log,
``state/`` what ``--resume`` needs; at the end it is removed and ``training.svg`` is drawn.

Which samples each step of an offline fit takes: a function of the seed and the position.

Nothing here has a state of its own, so that a position, two integers, is all that a resumed run
needs to draw what the uninterrupted one would have drawn.

Progress of long work for a person: one live line in a terminal, a line now and then in a log.

The log of a fit: ``training.jsonl``, one JSON object a line, each with its ``event``.

=============  ==================================================================================
``start``      settings, paths and SHA-256 of what is trained on, and how much of it there is
``step``       of one optimizer step: step, epoch, tokens (all so far), loss, step_loss and
               step_acceptance and step_top1 (one entry per TTT step), outside_mass, grad_norm,
               learning_rate, skipped, seconds
``evaluation``  of the held-out share: step, tokens, acceptance_length, standard_error,
               accepted_per_position, best (whether these weights are the draft now), seconds
``end``        step, tokens, seconds, and the best evaluation's step and acceptance_length
=============  ==================================================================================

Numbers that are not finite are null. ``seconds`` counts the time spent training, over restarts.

Draws a fit's log as one SVG: estimated acceptance length and loss against tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO
from xml.sax.saxutils import escape

import torch
from pydantic import Field, model_validator

from draft_trainer.checkpoints.draft import WEIGHTS_FILE
from draft_trainer.config import (
    Section,
    TrainingConfig,
    read_toml,
    validated,
)
from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.acceptance import AcceptanceEstimate, expected_acceptance
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.files import folder_written_whole, fsync, written_whole
from draft_trainer.recordings.recording import INDEX_FILE, Recording
from draft_trainer.training.learner import Learner, StepMetrics
from draft_trainer.training.optimizer import Schedule
from draft_trainer.training.ranks import Ranks, shares
from draft_trainer.training.state import Facts, StateStore, StateWriter, head_facts
from slipstream.errors import RefusedError
from slipstream.sample import Sample, is_held_out
from slipstream.tensors import digest


class FitSection(Section):
    """[fit]: the mechanism, how long, and what the result is judged by."""

    kind: Literal["eagle3"] = "eagle3"
    epochs: Annotated[int, Field(ge=1)] = 3
    evaluations: Annotated[int, Field(ge=1)] = 10
    held_out_fraction: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)] = 0.05
    held_out_tokens: Annotated[int, Field(ge=1)] = 65536
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    decay_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    decay_floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1


class FitConfig(Section):
    """The whole file. Of [training], what only a running service needs has no effect."""

    fit: FitSection = FitSection()
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="after")
    def _depth_covers_the_served_drafts(self) -> FitConfig:
        k, depth = self.fit.num_speculative_tokens, self.training.ttt_steps
        if depth < k:
            raise RefusedError(
                "training.ttt_steps",
                depth,
                f"at least fit.num_speculative_tokens = {k}",
                "raise training.ttt_steps, or serve a shorter draft",
            )
        return self


def fit_config(path: Path | None, options: Mapping[str, object]) -> FitConfig:
    """The file, where one is given, with the command line's options over it.

    Args:
        path: TOML; None for the defaults.
        options: dotted keys ("training.seed") and values.

    Raises:
        RefusedError: as ``draft_trainer.config.load_config``.
    """
    raw = {} if path is None else read_toml(path)
    for key, value in options.items():
        section, _, name = key.partition(".")
        held = raw.setdefault(section, {})
        if isinstance(held, dict):
            held[name] = value
    return validated(FitConfig, raw)


@dataclass(frozen=True, eq=False)
class FitData:
    """A recording, split by prompt.

    Attributes:
        recording: narrowed to the draft's layers.
        heads: every recorded policy version's matrices.
        training: numbers of the samples that are trained on.
        lengths: tokens of each of them.
        held_out: samples that are not; at most ``fit.held_out_tokens``.
    """

    recording: Recording
    heads: PolicyHeads
    training: list[int]
    lengths: list[int]
    held_out: list[Sample]

    def batch(self, chosen: Sequence[int]) -> list[Sample]:
        """Samples by their place in ``training``."""
        return [self.recording[self.training[i]] for i in chosen]


def split(recording: Recording, heads: PolicyHeads, config: FitConfig) -> FitData:
    """Hold out a share of the prompts.

    Raises:
        RefusedError: one of the two parts is empty.
    """
    fit, lengths = config.fit, recording.lengths()
    kept: list[int] = []
    training: list[int] = []
    groups = recording.groups()
    for number, group in enumerate(groups):
        (kept if is_held_out(group, fit.held_out_fraction) else training).append(number)
    # Any of them: the first would be the oldest policy version's.
    random.Random(config.training.seed).shuffle(kept)
    held_out: list[Sample] = []
    tokens = 0
    for number in kept:
        tokens += lengths[number]
        if held_out and tokens > fit.held_out_tokens:
            break
        held_out.append(recording[number])
    if not training or not held_out:
        raise RefusedError(
            "fit.held_out_fraction",
            f"{fit.held_out_fraction}: {len(training)} samples to train on, {len(kept)} held out, "
            f"of {len(set(groups))} prompts",
            "some of each",
            "record more prompts, or change fit.held_out_fraction",
        )
    return FitData(recording, heads, training, [lengths[i] for i in training], held_out)


LOG_FILE = "training.jsonl"


class TrainingLog:
    """Appends events. One process writes.

    Args:
        path: of the file; made when it is missing.
        keep_bytes: what is beyond is cut off: a resumed run writes those steps again.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        self._file.truncate(keep_bytes)
        self._file.seek(0, os.SEEK_END)

    def write(self, event: str, **fields: Any) -> None:
        """One line; a reader sees it whole once it is there."""
        line = json.dumps({"event": event} | {k: _finite(v) for k, v in fields.items()})
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Have everything on disk; how many bytes that is."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """No more events."""
        self._file.close()


def step_fields(metrics: StepMetrics) -> dict[str, Any]:
    """What a ``step`` says of the learner's step."""
    return {
        "loss": metrics.loss,
        "step_loss": metrics.step_loss,
        "step_acceptance": metrics.step_acceptance,
        "step_top1": metrics.step_top1,
        "outside_mass": metrics.outside_mass,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        "skipped": metrics.skipped,
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events of a log, without a last line that a kill cut short."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


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


STATE_FOLDER = "state"
PLOT_FILE = "training.svg"
_WRITE_SECONDS = 600.0


@dataclass(frozen=True)
class Standing:
    """Where a fit stands: with the learner's tensors all that the rest of it depends on.

    Attributes:
        step: optimizer steps done, skipped ones included.
        epoch: passes over the data that are done.
        index: samples of the present pass that are done.
        tokens: trained on.
        seconds: spent on it, evaluations not counted.
        best: highest estimated acceptance length.
        best_step: the step after which it was reached.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0


class FitOutput:
    """One output folder. One process writes.

    Args:
        folder: where.
        every_steps: optimizer steps between two training states; 0 writes one only at a stop.
    """

    def __init__(self, folder: Path, every_steps: int) -> None:
        self.folder = folder
        self._every_steps = every_steps
        self._saved = 0

    @property
    def is_finished(self) -> bool:
        """Whether a fit ended here."""
        log = self.folder / LOG_FILE
        if not log.is_file() or self._states.exists():
            return False
        events = read_log(log)
        return bool(events) and events[-1]["event"] == "end"

    def begin(self, learner: Learner, belongs_to: Facts, resume: bool) -> Standing:
        """Make the folder, or put what is in it into ``learner``.

        Raises:
            RefusedError: something is there that is not to be resumed, or cannot be with these
                inputs and this configuration.
            OSError: the folder cannot be written.
        """
        if not self.folder.exists():
            self._create(learner.snapshot())
        elif not (resume and self._states.is_dir()):
            unfinished = self._states.is_dir()
            advice = "give --resume to go on" if unfinished else "remove it, or choose another"
            raise RefusedError(f"--out {self.folder}", "something there", "a free name", advice)
        self._store = StateStore(self._states, belongs_to)
        self._writer = StateWriter(self._store)
        state = self._store.load()
        if state is None:
            self._log = TrainingLog(self.folder / LOG_FILE)
            return Standing()
        learner.load_state_dict(state.tensors)
        position = dict(state.position)
        self._log = TrainingLog(self.folder / LOG_FILE, position.pop("log_bytes"))
        self._saved = state.step
        return Standing(**position)

    def write(self, event: str, **fields: Any) -> None:
        """Append to the log."""
        self._log.write(event, **fields)

    def put(self, head: Draft) -> None:
        """Replace the draft's weights whole."""
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=self._states) as name:
            DRAFTERS[head.kind].save(Path(name), head)
            fsync(Path(name) / WEIGHTS_FILE)
            (Path(name) / WEIGHTS_FILE).replace(self.folder / WEIGHTS_FILE)
        fsync(self.folder)

    def after_step(self, learner: Learner, standing: Standing) -> None:
        """Write a training state when it is time: beside training, unless every step has one."""
        every = self._every_steps
        if every == 1:
            self.save(learner, standing)
        elif 0 < every <= standing.step - self._saved and self._writer.free:
            position = self._position(standing)
            self._writer.write(learner.state_dict(), standing.step, position, timeout=0.0)
            self._saved = standing.step

    def save(self, learner: Learner, standing: Standing) -> None:
        """Write a training state now. Raises OSError."""
        self._writer.wait(_WRITE_SECONDS)
        self._store.save(learner.state_dict(), standing.step, self._position(standing))
        self._saved = standing.step

    def finish(self) -> None:
        """After ``close``, of a fit that is done: draw the plot; nothing is left to resume."""
        draw(read_log(self.folder / LOG_FILE), self.folder / PLOT_FILE)
        shutil.rmtree(self._states)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.wait(_WRITE_SECONDS)
        self._log.sync()
        self._log.close()

    @property
    def _states(self) -> Path:
        return self.folder / STATE_FOLDER

    def _position(self, standing: Standing) -> Facts:
        return asdict(standing) | {"log_bytes": self._log.sync()}

    def _create(self, head: Draft) -> None:
        with folder_written_whole(self.folder) as temporary:
            DRAFTERS[head.kind].save(temporary, head)
            (temporary / LOG_FILE).touch()
            (temporary / STATE_FOLDER).mkdir()


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands.

    Attributes:
        epoch: passes over the data that are done.
        index: samples of the present pass that are done.
    """

    epoch: int = 0
    index: int = 0


class DataOrder:
    """Every sample once per epoch, in an order of that epoch's own.

    Args:
        lengths: tokens of every sample.
        batch_tokens: bound on the tokens of one step; a sample that is longer has a step to itself.
        seed: of the orders.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        if not lengths:
            raise RefusedError("samples", "none", "at least one", "record some states first")
        if batch_tokens < 1:
            raise RefusedError("batch_tokens", batch_tokens, "at least 1", "raise it")
        self._lengths = tuple(lengths)
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._epoch, self._order = -1, [0]

    def next_step(self, position: Position) -> tuple[list[int], Position]:
        """The samples of the step that begins at ``position``, and where the next one begins.

        A step never spans two epochs; the last one of an epoch may be short.
        """
        order = self.order(position.epoch)
        chosen: list[int] = []
        tokens = 0
        for sample in order[position.index :]:
            tokens += self._lengths[sample]
            if chosen and tokens > self._batch_tokens:
                break
            chosen.append(sample)
        index = position.index + len(chosen)
        if index == len(order):
            return chosen, Position(position.epoch + 1, 0)
        return chosen, Position(position.epoch, index)

    def steps(self, epochs: int, start: Position = Position()) -> Iterator[list[int]]:
        """The samples of every step from ``start`` to the end of the last epoch."""
        position = start
        while position.epoch < epochs:
            chosen, position = self.next_step(position)
            yield chosen

    def order(self, epoch: int) -> list[int]:
        """Sample indices of one epoch.

        Sorted by the numbers of ``random.Random``, whose sequence Python promises to keep for a
        seed; that of its shuffle, or of torch.randperm, may change between versions and would
        give a run that was resumed after an upgrade some samples twice and others never.
        """
        if epoch != self._epoch:
            draw = random.Random(f"{self._seed}:{epoch}").random
            keys = [draw() for _ in self._lengths]
            self._order = sorted(range(len(keys)), key=keys.__getitem__)
            self._epoch = epoch
        return self._order


LINE_SECONDS = 10.0
LIVE_SECONDS = 0.1


class Progress:
    """Writes to a stream; silent without one. Costs next to nothing when called too often.

    Args:
        stream: where to; None for nowhere (ranks other than 0).
    """

    def __init__(self, stream: TextIO | None = sys.stderr) -> None:
        self._stream = stream
        self._live = stream is not None and stream.isatty()
        self._shown_at = -LINE_SECONDS
        self._width = 0

    @property
    def due(self) -> bool:
        """Whether ``update`` would show something: for those who must compute what to say."""
        pause = LIVE_SECONDS if self._live else LINE_SECONDS
        return self._stream is not None and time.monotonic() - self._shown_at >= pause

    def update(self, text: str) -> None:
        """How far it is; replaces what was said before in a terminal."""
        if self.due:
            self._shown_at = time.monotonic()
            self._write(text, end="" if self._live else "\n")

    def say(self, text: str) -> None:
        """Something that stays."""
        self._write(text, end="\n")

    def _write(self, text: str, end: str) -> None:
        if self._stream is None:
            return
        if self._live:
            padding = " " * max(self._width - len(text), 0)
            self._width = 0 if end else len(text)
            text = f"\r{text}{padding}"
        self._stream.write(text + end)
        self._stream.flush()


def duration(seconds: float) -> str:
    """As a person says it: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


_NOT_IN_THE_RESULT = {
    *("threads", "nice", "device", "rank_timeout_s"),
    *("linger_s", "steps_per_candidate", "state_every_steps"),
}


@dataclass(frozen=True)
class FitFolders:
    """What a fit reads and writes.

    Attributes:
        states: the recording.
        draft: the draft that it begins with.
        out: made.
        policy: the draft's policy, where the draft's checkpoint does not say everything.
    """

    states: Path
    draft: Path
    out: Path
    policy: Path | None = None


class Fit:
    """One fit, from reading its inputs to its last step.

    Args:
        folders: what it reads and writes.
        config: how.
        ranks: this process among the ranks that fit together; all call the same methods.
        progress: silent on ranks other than 0.

    Raises:
        RefusedError: states, draft and configuration do not fit one another; nothing was written.
    """

    def __init__(
        self, folders: FitFolders, config: FitConfig, ranks: Ranks, progress: Progress
    ) -> None:
        self._folders = folders
        self._config = config
        self._ranks = ranks
        self._progress = progress
        head = DRAFTERS[config.fit.kind].read(folders.draft, folders.policy).draft()
        fit, training = config.fit, config.training
        recording = Recording(
            folders.states,
            lambda done, total: progress.update(f"verifying recorded states {done / total:4.0%}"),
        )
        recording.fit_to(head.config)
        self._data = split(recording, recording.policy_heads(head.target_ids()), config)
        self._order = DataOrder(self._data.lengths, training.batch_tokens, training.seed)
        self._total = sum(1 for _ in self._order.steps(fit.epochs))
        self._evaluate_at = {
            round(self._total * (i + 1) / fit.evaluations) for i in range(fit.evaluations)
        }
        self._sha256 = {
            "states": hashlib.sha256((folders.states / INDEX_FILE).read_bytes()).hexdigest(),
            "draft": _sha256(head),
        }
        schedule = Schedule(
            training.learning_rate,
            training.warmup_steps,
            self._total,
            fit.decay_floor,
            fit.decay_share,
        )
        self._learner = Learner(head.to(ranks.device), training, ranks, schedule)
        self._output = FitOutput(folders.out, training.state_every_steps)
        self._now = Standing()

    def run(self, stopping: threading.Event, resume: bool) -> bool:
        """Train to the end, or to the end of the step during which ``stopping`` is set.

        Args:
            stopping: set by a signal handler.
            resume: go on with the unfinished fit in the output folder, if there is one.

        Returns:
            Whether the fit is done.

        Raises:
            RefusedError: the output folder holds something else, or an unfinished fit of other
                inputs or another configuration.
            RankLostError: another rank is gone.
            OSError: the output folder cannot be written.
        """
        if resume and self._output.is_finished:
            self._progress.say(f"{self._folders.out} is finished")
            return True
        first = self._ranks.rank == 0
        if first:
            self._now = self._output.begin(self._learner, self._belongs_to(), resume)
        try:
            self._agree()
            if first and self._now.step == 0:
                self._output.write("start", **self._start_facts())
                self._evaluate()
            elif self._now.step:
                self._progress.say(f"going on after step {self._now.step} of {self._total}")
            done = self._train(stopping)
            if first and done:
                self._end()
        finally:
            if first:
                self._output.close()
        if first and done:
            self._output.finish()
        return done

    def _agree(self) -> None:
        """Put every rank where rank 0 is."""
        self._learner.take_rank_0()
        where = torch.tensor([self._now.step, self._now.epoch, self._now.index])
        self._ranks.broadcast({"where": where})
        step, epoch, index = where.tolist()
        self._now = replace(self._now, step=step, epoch=epoch, index=index)

    def _train(self, stopping: threading.Event) -> bool:
        began_at, began = time.monotonic(), self._now.step
        while self._now.epoch < self._config.fit.epochs:
            epoch = self._now.epoch
            metrics = self._step()
            now = self._now
            # One rank may have been signalled before the others: they stop together.
            stop = bool(self._ranks.gather(torch.tensor([int(stopping.is_set())])).any())
            if self._ranks.rank == 0:
                where = {"step": now.step, "epoch": epoch, "tokens": now.tokens}
                self._output.write("step", **where, **step_fields(metrics), seconds=now.seconds)
                if self._progress.due:
                    pace = (time.monotonic() - began_at) / (now.step - began)
                    self._progress.update(self._line(metrics, pace))
                if now.step in self._evaluate_at:
                    self._evaluate()
                self._output.after_step(self._learner, self._now)
            if stop and now.step < self._total:
                if self._ranks.rank == 0:
                    self._output.save(self._learner, self._now)
                self._progress.say(
                    f"stopped after step {now.step} of {self._total}; --resume goes on"
                )
                return False
        return True

    def _step(self) -> StepMetrics:
        """One step on this rank's share of the next samples."""
        started = time.perf_counter()
        chosen, position = self._order.next_step(Position(self._now.epoch, self._now.index))
        lengths = [self._data.lengths[i] for i in chosen]
        mine = shares(lengths, self._ranks.size)[self._ranks.rank]
        samples = self._data.batch([chosen[i] for i in mine])
        metrics = self._learner.step(samples, self._data.heads)
        self._now = replace(
            self._now,
            step=self._now.step + 1,
            epoch=position.epoch,
            index=position.index,
            tokens=self._now.tokens + metrics.tokens,
            seconds=self._now.seconds + time.perf_counter() - started,
        )
        return metrics

    def _evaluate(self) -> None:
        """Estimate the acceptance of what would be served; keep it if it is the best so far."""
        started = time.perf_counter()
        served, fit, now = self._learner.snapshot(), self._config.fit, self._now
        estimate = expected_acceptance(
            served,
            self._data.held_out,
            self._data.heads,
            fit.num_speculative_tokens,
            fit.draft_sample_method,
            max_batch_tokens=self._config.training.forward_tokens,
        )
        length, error = estimate.acceptance_length, _standard_error(estimate)
        best = length > now.best
        if best:
            self._now = replace(now, best=length, best_step=now.step)
            self._output.put(served)
        self._output.write(
            "evaluation",
            step=now.step,
            tokens=now.tokens,
            acceptance_length=length,
            standard_error=error,
            accepted_per_position=estimate.accepted_per_position,
            best=best,
            seconds=now.seconds,
        )
        positions = " ".join(f"{rate:.3f}" for rate in estimate.accepted_per_position)
        self._progress.say(
            f"step {now.step}/{self._total}: expected acceptance length {length:.3f} ± {error:.3f} "
            f"(s.e.) at k = {fit.num_speculative_tokens}, per position {positions}"
            f"{', the best so far' if best else ''} ({time.perf_counter() - started:.1f} s)"
        )

    def _end(self) -> None:
        now = self._now
        self._output.write(
            "end",
            step=now.step,
            tokens=now.tokens,
            seconds=now.seconds,
            best_step=now.best_step,
            acceptance_length=now.best,
        )
        self._progress.say(
            f"{self._folders.out}: expected acceptance length {now.best:.3f}, of step "
            f"{now.best_step}; {now.tokens:,} tokens in {duration(now.seconds)}"
        )

    def _belongs_to(self) -> dict[str, object]:
        """What makes another fit's training state wrong for this one."""
        facts: dict[str, object] = {f"sha256 of {k}": v for k, v in self._sha256.items()}
        for name, section in self._config.model_dump(mode="json").items():
            for key in section.keys() - _NOT_IN_THE_RESULT:
                facts[f"{name}.{key}"] = section[key]
        return facts | head_facts(self._learner.head.config)

    def _start_facts(self) -> dict[str, Any]:
        data = self._data
        return {
            "states": str(self._folders.states),
            "draft": str(self._folders.draft),
            "sha256": self._sha256,
            "config": self._config.model_dump(mode="json"),
            "ranks": self._ranks.size,
            "threads": torch.get_num_threads(),
            "steps": self._total,
            "samples": len(data.training),
            "tokens_per_epoch": sum(data.lengths),
            "held_out_samples": len(data.held_out),
            "held_out_tokens": sum(sample.tokens for sample in data.held_out),
        }

    def _line(self, metrics: StepMetrics, pace: float) -> str:
        """For a person.

        Args:
            metrics: of the last step.
            pace: seconds per step since this process began.
        """
        rates = " ".join(f"{rate:.3f}" for rate in metrics.step_acceptance)
        return (
            f"step {self._now.step}/{self._total}  {self._now.tokens:,} tokens  "
            f"{metrics.tokens / metrics.seconds:,.0f} tokens/s  loss {metrics.loss:.4f}  "
            f"acceptance {rates}  ETA {duration(pace * (self._total - self._now.step))}"
        )


def _standard_error(estimate: AcceptanceEstimate) -> float:
    return float(estimate.per_sequence.std()) / estimate.sequences**0.5


def _sha256(head: Draft) -> str:
    """Over its weights' names and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        total.update(name.encode() + digest(tensor))
    return total.hexdigest()
