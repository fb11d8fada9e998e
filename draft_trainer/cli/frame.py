"""One picture of a trainer as lines of text: what ``draft-trainer top`` draws."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from draft_trainer.cli.events import described, kind_name
from draft_trainer.cli.fleet_lines import fleet_lines, heading
from draft_trainer.cli.past import (
    DASH,
    duration,
    lengths,
    losses,
    number,
    per_position,
    rate,
    rates,
    share,
)
from draft_trainer.cli.sparkline import bar, sparkline
from draft_trainer.cli.trainer import mebibytes, plain
from slipstream.v1 import console_pb2, release_pb2
from slipstream.v1 import draft_trainer_pb2 as pb

SPARK, NARROW_SPARK, NARROW = 24, 14, 96
SNAPSHOT_SECONDS = 10.0
FEWEST_EVENTS = 3
_BAD = (
    *("stage_failed", "training_failed", "rolled_back", "not_committed", "unreachable"),
    *("not_ready", "not_written"),
)
_GOOD = ("committed", "passed", "promoted", "healed", "ready", "back")


@dataclass
class Seen:
    """What was heard of a trainer.

    Args:
        status: newest.
        history: newest.
        events: newest last.
        error: why the last question was not answered; empty when it was.
        asked_at: seconds since the epoch, of the last answer.
    """

    address: str
    status: pb.TrainerStatus
    history: pb.History
    events: Sequence[console_pb2.Event] = ()
    error: str = ""
    asked_at: float = field(default_factory=time.time)


def frame(seen: Seen, width: int, height: int | None, now: float) -> list[Text]:
    """The lines, none wider than ``width``, at most ``height`` of them (None: as many as it takes).

    Args:
        seen: what is drawn.
        width: columns of the terminal.
        height: rows of it.
        now: seconds since the epoch.
    """
    status, history = seen.status, seen.history
    spark = SPARK if width >= NARROW else NARROW_SPARK
    top = [_title(seen, width, now), _versions(status)]
    if seen.error:
        top.append(Text(f" {plain(seen.error)}", style="bold red"))
    middle = [
        heading("acceptance", "length: tokens per verification step, 1 + accepted / drafts", width),
        *_acceptance(status, history, spark),
        heading("ingest and training", "", width),
        *_ingest(status, history, spark),
        *_training(status, history, spark, now),
        heading("events", "", width),
    ]
    fixed = len(top) + len(middle) + FEWEST_EVENTS
    fleet = fleet_lines(status, width, None if height is None else height - fixed)
    room = None if height is None else max(0, height - len(top) - len(middle) - len(fleet))
    events = [_event(event) for event in list(seen.events)[-(room or 0) :]] if room != 0 else []
    lines = [*top, *fleet, *middle, *(events or [Text(" none yet", style="dim")])]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _title(seen: Seen, width: int, now: float) -> Text:
    status = seen.status
    left = Text.assemble(
        (" draft-trainer ", "bold black on cyan"),
        f" {plain(seen.address)}",
        ("  run ", "dim"),
        plain(status.run_id) or DASH,
        ("  up ", "dim"),
        duration(now - status.started_at),
        ("  version ", "dim"),
        plain(status.code_version),
    )
    clock = time.strftime("%H:%M:%S ", time.localtime(now))
    left.truncate(width - len(clock) - 1, overflow="ellipsis")
    left.pad_right(width - len(clock) - left.cell_len)
    return left.append(clock, style="dim")


def _versions(status: pb.TrainerStatus) -> Text:
    known = status.HasField
    line = Text(" ")
    line.append("policy ", style="dim")
    line.append(str(status.policy_version) if known("policy_version") else DASH, style="bold")
    line.append("   draft promoted ", style="dim")
    line.append(str(status.promoted_release) if known("promoted_release") else DASH, style="bold")
    line.append("   newest ", style="dim")
    line.append(str(status.newest_release) if known("newest_release") else DASH)
    line.append("   staleness ", style="dim")
    stale = status.staleness if known("staleness") else None
    style = "" if stale is None or stale < 4 else "bold yellow"
    line.append(DASH if stale is None else _count(stale, "policy version"), style=style)
    if status.pinned:
        line.append("   pinned by hand", style="bold yellow")
    if known("trial"):
        line.append(f"   draft {status.trial.draft_version} on trial", style="bold cyan")
    return line


def _acceptance(status: pb.TrainerStatus, history: pb.History, spark: int) -> list[Text]:
    found = status.last_minute
    drafts = sum(d.drafts for d in found)
    k = max((len(d.accepted_per_position) for d in found), default=0)
    accepted = [
        sum(d.accepted_per_position[i] for d in found if i < len(d.accepted_per_position))
        for i in range(k)
    ]
    now = 1 + sum(accepted) / drafts if drafts else None
    first = _labelled("length")
    first.append(f"{number(now):>6}", style="bold green" if now is not None else "dim")
    first.append("  last minute   ", style="dim")
    first.append(sparkline(lengths(history.snapshots), spark), style="green")
    first.append(f"  last {duration(SNAPSHOT_SECONDS * spark)}", style="dim")
    first.append(f"   {drafts / 60:.0f} drafts/s" if drafts else "   no drafts", style="dim")
    second = _labelled("by position")
    for share_ in per_position(drafts, accepted):
        second.append(f"{share(share_)} ", style="bold")
        second.append(bar(share_, 10), style="green")
        second.append("  ")
    if not drafts:
        second.append(f"{DASH:>6}", style="dim")
    return [first, second]


def _ingest(status: pb.TrainerStatus, history: pb.History, spark: int) -> list[Text]:
    first = _labelled("samples")
    first.append(f"{status.samples_accepted:,} accepted  ")
    first.append(sparkline(rates(history.snapshots, _samples), spark), style="blue")
    first.append(f"  {number(rate(history.snapshots, _samples), '.1f')}/s", style="bold")
    refused = f"   {status.samples_refused:,} refused"
    first.append(refused, style="bold yellow" if status.samples_refused else "dim")
    evicted = f"   {status.samples_evicted:,} given up"
    first.append(evicted, style="yellow" if status.samples_evicted else "dim")
    second = _labelled("replay")
    full = status.replay_bytes / max(1, status.replay_capacity_bytes)
    second.append(bar(full, spark), style="blue on grey23")
    second.append(f"  {mebibytes(status.replay_bytes)} of ")
    second.append(f"{mebibytes(status.replay_capacity_bytes)} MiB")
    second.append(f"   {status.samples_pending:,} pending", style="dim")
    return [first, second]


def _training(status: pb.TrainerStatus, history: pb.History, spark: int, now: float) -> list[Text]:
    first = _labelled("training")
    if status.training_error:
        first.append(plain(status.training_error), style="bold red")
        return [first]
    first.append("idle   " if status.idle else "busy   ", style="dim" if status.idle else "bold")
    first.append(f"loss {number(status.loss if status.HasField('loss') else None)}  ")
    first.append(sparkline(losses(history.snapshots), spark), style="magenta")
    first.append(f"  {status.train_steps:,} steps", style="bold")
    if status.train_steps_skipped:
        first.append(f"   {status.train_steps_skipped:,} skipped", style="bold yellow")
    tokens = rate(history.snapshots, lambda m: m.tokens_trained)
    first.append(f"   {number(tokens, ',.0f')} tokens/s", style="dim")
    second = _labelled("expected")
    expected = " ".join(share(value) for value in status.step_acceptance)
    second.append(expected or DASH)
    second.append("  accepted at each step of training-time test", style="dim")
    gate = _labelled("gate")
    for name, style in (("passed", "green"), ("failed", ""), ("not_measured", "dim")):
        gate.append(f"{status.verdicts[name]} {name.replace('_', ' ')}  ", style=style)
    if status.HasField("last_verdict"):
        gate.append(_verdict(status.last_verdict, now))
    return [first, second, gate]


def _verdict(verdict: release_pb2.Verdict, now: float) -> str:
    return f" {duration(now - verdict.judged_at)} ago: {plain(verdict.reason)}"


def _event(event: console_pb2.Event) -> Text:
    name = kind_name(event)
    style = "bold"
    if any(word in name for word in _BAD):
        style = "bold red"
    elif any(word in name for word in _GOOD):
        style = "bold green"
    clock = time.strftime(" %H:%M:%S  ", time.localtime(event.time))
    return Text.assemble((clock, "dim"), (f"{name:20}", style), f" {described(event)}")


def _samples(moment: pb.TrainerStatus) -> int:
    return moment.samples_accepted


def _labelled(name: str) -> Text:
    return Text.assemble((f" {name:12}", "dim"))


def _count(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
