"""``draft-trainer status`` and ``events``: a running trainer in a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import grpc
from tyro.conf import arg

from draft_trainer.cli.doctor import described as described_diagnosis
from draft_trainer.cli.trainer import (
    Connection,
    as_dict,
    at_least,
    explained,
    mebibytes,
    print_json,
    table,
    when,
)
from slipstream.errors import RefusedError, clean
from slipstream.v1 import console_pb2 as console
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

DASH = "\N{EN DASH}"
"""The mark of a figure that is not known: no drafts is not an acceptance length of 1."""

EVENTS_SHOWN = 8
WATCH_SECONDS = 1.0
FOLLOW_SECONDS, RETRY_SECONDS = 3600.0, 1.0
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@dataclass(frozen=True, kw_only=True)
class Status(Connection):
    """Show the state of a running trainer and of every rollout server.

    With the diagnosis, which says what releases wait for, and the newest events. With --watch it
    is shown again every second, across restarts of the trainer, until it is interrupted.
    """

    watch: Annotated[bool, arg(aliases=["-w"])] = False
    """Show it again every second."""
    json: bool = False
    """The whole status as JSON."""

    def run(self) -> int:
        absent = False
        with self.trainer() as stub:
            self._show(stub)
            while self.watch:
                time.sleep(WATCH_SECONDS)
                try:
                    self._show(stub)
                    absent = False
                except grpc.RpcError as error:
                    if not absent:
                        text = f"draft-trainer: {explained(error, self.address)}; trying again"
                        print(text, file=sys.stderr, flush=True)
                    absent = True
        return 0

    def _show(self, stub: pb_grpc.DraftTrainerStub) -> None:
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=self.timeout)
        if self.json:
            print_json(as_dict(status))
            return
        request = console.WatchEventsRequest(newest=EVENTS_SHOWN)
        events = list(stub.WatchEvents(request, timeout=self.timeout))
        lines = list(described(status, events))
        if self.watch and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            columns, rows = shutil.get_terminal_size()
            # Redraw from the top: cut each line and clear its rest, then clear all lines below.
            kept = "\x1b[K\n".join(line[:columns] for line in lines[: rows - 1])
            print(f"\x1b[H{kept}\x1b[K\n\x1b[J", end="", flush=True)
        else:
            print("\n".join(lines), flush=True)


@dataclass(frozen=True, kw_only=True)
class Events(Connection):
    """Show past events and, with --follow, new ones.

    Prints the newest events, oldest first. With --follow it continues until it is interrupted,
    across restarts of the trainer, without gaps or repetitions.
    """

    follow: Annotated[bool, arg(aliases=["-f"])] = False
    """Print new events as they happen."""
    newest: Annotated[int, arg(metavar="N")] = 20
    """Number of past events; 0: all that are kept."""
    after: Annotated[int, arg(metavar="NUMBER")] = 0
    """Only events with a higher number."""
    registry: Annotated[Path | None, arg(metavar="DIR")] = None
    """A registry's folder, to read directly instead of asking a trainer."""
    json: bool = False
    """One JSON object per line."""

    def run(self) -> int:
        at_least("--newest", self.newest, 0)
        at_least("--after", self.after, 0)
        for event in self._wanted():
            print(json.dumps(as_dict(event)) if self.json else _event(event), flush=True)
        return 0

    def _wanted(self) -> Iterator[console.Event]:
        if self.registry is not None:
            if self.follow:
                next_step = "leave --registry out to follow a running trainer"
                raise RefusedError("--follow", "with --registry", "one of them", next_step)
            from draft_trainer.cli.releases import RegistryFolder

            with RegistryFolder(self.registry).registry.reading() as state:
                yield from state.events.since(self.after, self.newest)
            return
        request = console.WatchEventsRequest(
            after=self.after, newest=self.newest, follow=self.follow
        )
        timeout = FOLLOW_SECONDS if self.follow else self.timeout
        absent = False
        with self.trainer() as stub:
            if self.follow:
                # Once it has answered, a trainer that does not is restarting or has no new event.
                stub.GetStatus(pb.GetStatusRequest(), timeout=self.timeout)
            while True:
                try:
                    for event in stub.WatchEvents(request, timeout=timeout):
                        absent = False
                        request.after, request.newest = event.number, 0
                        yield event
                except grpc.RpcError as error:
                    code = error.code() if isinstance(error, grpc.Call) else None
                    if not (self.follow and code in _GONE):
                        raise
                    if code is not grpc.StatusCode.DEADLINE_EXCEEDED and not absent:
                        absent = True
                        text = explained(error, self.address)
                        print(f"draft-trainer: {text}; trying again", file=sys.stderr, flush=True)
                if not self.follow:
                    return
                time.sleep(RETRY_SECONDS)


def described(status: pb.TrainerStatus, events: Sequence[console.Event]) -> Iterator[str]:
    """Yield a status as lines for people, the newest events last."""

    def known(name: str, form: str = "") -> str:
        return format(getattr(status, name), form) if status.HasField(name) else DASH  # type: ignore[arg-type]

    yield (
        f"draft-trainer {clean(status.code_version)}  run {clean(status.run_id) or DASH}  "
        f"up {_duration(status.time - status.started_at)}  at {when(status.time)}"
    )
    yield (
        f"policy {known('policy_version')}  serves draft {known('served_release')}, "
        f"{known('served_staleness')} versions behind  "
        f"promoted release {known('promoted_release')}  newest {known('newest_release')}"
    )
    yield ""
    yield from described_diagnosis(list(status.diagnosis))
    yield ""
    drafted = status.drafted
    yield f"speed-up  {known('speed_up', '.2f')} ({status.speed_up_note})"
    yield (
        f"length    {_length(drafted)}  by position {_shares(drafted.acceptance_per_position)}  "
        f"{drafted.drafts / 60:.0f} drafts/s in the last minute"
    )
    yield (
        f"samples   {status.samples_accepted:,} accepted  "
        f"{known('samples_per_second', '.1f')}/s  {status.samples_refused:,} refused  "
        f"{status.samples_evicted:,} evicted  {status.samples_pending:,} pending  "
        f"{mebibytes(status.replay_bytes)} of {mebibytes(status.replay_capacity_bytes)} MiB"
    )
    yield (
        f"training  loss {known('loss', '.3f')}  {status.train_steps:,} steps  "
        f"{status.train_steps_skipped:,} skipped  {known('tokens_per_second', ',.0f')} tokens/s  "
        f"expected by position {_shares(status.step_acceptance)}"
    )
    judged = _duration(status.time - status.last_verdict.judged_at)
    yield (
        f"gate      {status.verdicts.get('passed', 0)} passed  "
        f"{status.verdicts.get('failed', 0)} failed  "
        f"last verdict {judged + ' ago' if status.HasField('last_verdict') else DASH}"
    )
    yield ""
    yield from _servers(status)
    yield ""
    yield from map(_event, events)


def _servers(status: pb.TrainerStatus) -> Iterator[str]:
    """Yield a table of the fleet; servers that need somebody come first."""
    if not status.servers:
        yield "no rollout servers (publish.rollout_servers)"
        return
    rows: list[list[object]] = [
        ["server ", "state ", "draft", "policy", "length", "by position ", "why "]
    ]
    for server in sorted(status.servers, key=lambda server: -server.severity):
        state, drafted = server.state, server.last_minute
        rows.append(
            [
                clean(server.address),
                server.standing,
                state.draft_version if server.HasField("state") else DASH,
                state.policy_version if state.HasField("policy_version") else DASH,
                _length(drafted),
                _shares(drafted.acceptance_per_position),
                clean(server.error or server.not_ready),
            ]
        )
    yield from table(rows)


def _event(event: console.Event) -> str:
    from draft_trainer.state import described

    return f"{when(event.time)}  {clean(event.kind):22}{described(event)}".rstrip()


def _length(drafted: console.Drafted) -> str:
    known = drafted.HasField("acceptance_length")
    return f"{drafted.acceptance_length:.3f}" if known else DASH


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or DASH


def _duration(seconds: float) -> str:
    """Format seconds as 0:00:45, as 3:12:03, or as 2 days, 3:12:03."""
    return str(timedelta(seconds=max(0, int(seconds))))
