"""``draft-trainer status``, ``top`` and ``events``: a running trainer in a terminal."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from tyro.conf import arg

from draft_trainer.cli.doctor import first_problem
from draft_trainer.cli.trainer import (
    Connection,
    as_dict,
    at_least,
    explained,
    mebibytes,
    print_json,
    when,
)
from slipstream.errors import RefusedError, clean
from slipstream.v1 import console_pb2 as console
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

DASH = "\N{EN DASH}"
"""Where there is no number: no drafts is not an acceptance length of 1."""

SERVERS_SHOWN, EVENTS_SHOWN = 16, 50
RATE_SECONDS = 60.0
LIVE_TIMEOUT, KEY_SECONDS = 2.0, 0.25
FOLLOW_SECONDS, RETRY_SECONDS = 3600.0, 1.0
_SERVER_COLUMNS = ("server", "state", "draft", "policy", "length", "by position", "why")
_BAD = (
    *("stage_failed", "training_failed", "rolled_back", "not_committed", "unreachable"),
    *("not_ready", "not_written"),
)
_GOOD = ("committed", "passed", "promoted", "healed", "ready", "back")
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@dataclass(frozen=True, kw_only=True)
class Status(Connection):
    """Show the state of a running trainer and of every rollout server."""

    json: bool = False
    """The whole status as JSON."""

    def run(self) -> int:
        with self.trainer() as stub:
            if self.json:
                status = stub.GetStatus(pb.GetStatusRequest(), timeout=self.timeout)
                print_json(as_dict(status))
            else:
                seen = Seen.of(stub, self.address, self.timeout)
                Console(highlight=False).print(picture(seen, len(seen.status.servers)))
        return 0


@dataclass(frozen=True, kw_only=True)
class Top(Connection):
    """A running trainer, live in the terminal.

    Draws fleet, acceptance, ingest, training, gate and the newest events, and draws them again
    every second. q ends it.
    """

    timeout: Annotated[float, arg(metavar="S")] = 10.0
    """Seconds to wait for the answer."""
    interval: Annotated[float, arg(metavar="S")] = 1.0
    """Seconds between two pictures, 0.2 to 60."""

    def run(self) -> int:
        """Draws until q is pressed."""
        if not 0.2 <= self.interval <= 60.0:
            raise RefusedError("--interval", self.interval, "0.2 to 60", "choose from that range")
        screen = Console(highlight=False)
        if not screen.is_terminal or screen.is_dumb_terminal:
            found = "one that cannot be redrawn (TERM)" if screen.is_terminal else "no terminal"
            raise RefusedError("stdout", found, "a terminal", "use draft-trainer status")
        with self.trainer() as stub:
            self._live(screen, stub, Seen.of(stub, self.address, self.timeout))
        return 0

    def _live(self, screen: Console, stub: pb_grpc.DraftTrainerStub, seen: Seen) -> None:
        asked, size = time.monotonic(), screen.size
        live = Live(picture(seen), console=screen, screen=True, auto_refresh=False)
        with _keys() as pressed, live:
            try:
                while not pressed(KEY_SECONDS):
                    due = time.monotonic() - asked >= self.interval
                    if due:
                        asked = time.monotonic()
                        seen.ask(stub)
                    if due or screen.size != size:
                        size = screen.size
                        live.update(picture(seen), refresh=True)
            except KeyboardInterrupt:
                return


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
        from draft_trainer.state import described

        at_least("--newest", self.newest, 0)
        at_least("--after", self.after, 0)
        for event in self._wanted():
            if self.json:
                text = json.dumps(as_dict(event))
            else:
                text = f"{when(event.time)}  {clean(event.kind):22}{described(event)}".rstrip()
            print(text, flush=True)
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
                # From here on a trainer that does not answer restarts, or has no new event.
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


@dataclass
class Seen:
    """What a trainer answered."""

    address: str
    status: pb.TrainerStatus
    past: deque[pb.TrainerStatus] = field(default_factory=lambda: deque(maxlen=600))
    events: Sequence[console.Event] = ()
    error: str = ""
    answered: float = field(default_factory=time.monotonic)
    """When ``status`` came, by this process's clock: the trainer's may differ, and be set."""

    @classmethod
    def of(cls, stub: pb_grpc.DraftTrainerStub, address: str, timeout: float) -> Seen:
        """Everything that is known now."""
        seen = cls(address, stub.GetStatus(pb.GetStatusRequest(), timeout=timeout))
        history = stub.GetHistory(console.GetHistoryRequest(), timeout=timeout)
        seen.past.extend(history.snapshots)
        seen.ask_events(stub, timeout)
        return seen

    def ask(self, stub: pb_grpc.DraftTrainerStub) -> None:
        """The newest; without an answer the last one stays, and ``error`` says so."""
        try:
            self.past.append(self.status)
            self.status = stub.GetStatus(pb.GetStatusRequest(), timeout=LIVE_TIMEOUT)
            self.answered = time.monotonic()
            self.ask_events(stub, LIVE_TIMEOUT)
            self.error = ""
        except grpc.RpcError as error:
            age = time.monotonic() - self.answered
            self.error = (
                f"no answer for {age:.0f} s, trying again. {explained(error, self.address)}"
            )

    def ask_events(self, stub: pb_grpc.DraftTrainerStub, timeout: float) -> None:
        """The newest events."""
        request = console.WatchEventsRequest(newest=EVENTS_SHOWN)
        self.events = list(stub.WatchEvents(request, timeout=timeout))

    def rate(self, name: str) -> float | None:
        """Growth of a counter per second over the last minute."""
        now = self.status
        for then in self.past:
            same = then.started_at == now.started_at
            if same and now.time - RATE_SECONDS <= then.time < now.time:
                return float((getattr(now, name) - getattr(then, name)) / (now.time - then.time))
        return None


def picture(seen: Seen, servers: int = SERVERS_SHOWN) -> Group:
    """Everything on one screen, the newest event first."""
    from draft_trainer.state import described

    status = seen.status
    ready = sum(server.reachable and not server.state.not_ready for server in status.servers)
    parts: list[RenderableType] = [_title(seen), _versions(status)]
    if seen.error:
        parts.append(Text(f" {clean(seen.error)}", style="bold red"))
    first = first_problem(list(status.diagnosis))
    if first is not None:
        style = "bold red" if first.severity == console.Diagnosis.SEVERITY_PROBLEM else "yellow"
        parts.append(_line((f" {first.part} ", style), clean(first.found)))
    parts += [_rule(f"fleet, {ready} of {len(status.servers)} ready"), _fleet(status, servers)]
    parts += [_rule(_speed_up(status)), _figures(seen), _rule("events")]
    events = Table.grid(padding=(0, 1), pad_edge=True)
    for event in reversed(seen.events):
        name = clean(event.kind)
        style = "red" if _names(_BAD, name) else "green" if _names(_GOOD, name) else ""
        clock = time.strftime("%H:%M:%S", time.localtime(event.time))
        cells = (Text(clock, "dim"), Text(name, f"bold {style}"), Text(described(event)))
        events.add_row(*cells)
    parts.append(events if seen.events else Text(" none yet", "dim"))
    return Group(*parts)


def _title(seen: Seen) -> Text:
    status = seen.status
    return _line(
        (" draft-trainer ", "bold black on cyan"),
        f" {clean(seen.address)}  run {clean(status.run_id) or DASH}"
        f"  up {duration(status.time - status.started_at)}  version {clean(status.code_version)}",
    )


def _versions(status: pb.TrainerStatus) -> Text:
    def known(name: str) -> str:
        return str(getattr(status, name)) if status.HasField(name) else DASH

    stale = known("served_staleness")
    waits = status.HasField("served_release") and status.served_release != status.promoted_release
    word = "undecided" if status.trial.undecided else "on trial"
    trial = f"   draft {status.trial.draft_version} {word}" if status.HasField("trial") else ""
    return _line(
        (f" policy {known('policy_version')}   serves draft {known('served_release')}", "bold"),
        f"   promoted release {known('promoted_release')}",
        (", not served yet" if waits else "", "bold yellow"),
        f"   newest {known('newest_release')}   ",
        (
            f"{stale} version{'' if stale == '1' else 's'} behind",
            "bold yellow" if status.served_staleness >= 4 else "",
        ),
        ("   pinned by hand" if status.pinned else "", "bold yellow"),
        (trial, "bold cyan"),
    )


def _fleet(status: pb.TrainerStatus, most: int) -> RenderableType:
    if not status.servers:
        return Text(" no rollout servers (publish.rollout_servers)", "dim")
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in _SERVER_COLUMNS:
        side: Literal["left", "right"] = "right" if name[0] in "dpl" else "left"
        # Where there is no room for all, the last column gives up its own.
        table.add_column(name, no_wrap=name != "why", justify=side)
    servers = sorted(status.servers, key=lambda s: (_state_of(s)[1] == "green", s.address))
    for server in servers[:most]:
        address, *cells, why = map(str, _server_cells(server))
        table.add_row(Text(address), Text(*_state_of(server)), *cells, Text(why[:120], "red"))
    if len(servers) > most:
        return Group(
            table,
            Text(f" and {len(servers) - most} more, all shown by draft-trainer status", "dim"),
        )
    return table


def _figures(seen: Seen) -> Table:
    status = seen.status
    drafts = sum(d.drafts for d in status.last_minute)
    accepted = sum(sum(d.accepted_per_position) for d in status.last_minute)
    length = number(1 + accepted / drafts if drafts else None)
    full = 100 * status.replay_bytes / max(1, status.replay_capacity_bytes)
    loss = number(status.loss if status.HasField("loss") else None)
    gate = "  ".join(f"{status.verdicts[name]} {name}" for name in ("passed", "failed"))
    if status.HasField("last_verdict"):
        ago = duration(status.time - status.last_verdict.judged_at)
        gate += f"  {ago} ago: {clean(status.last_verdict.reason)}"
    state = "idle" if status.idle else "busy"
    if status.training_paused:
        state = f"paused: {clean(status.training_decision)}"
    table = Table.grid(padding=(0, 1), pad_edge=True)
    table.add_column(style="dim")
    rows: dict[str, Text] = {
        "length": _line(
            (length, "bold green" if drafts else "dim"),
            f"  by position {_by_position(*status.last_minute)}",
            (f"  {drafts / 60:.0f} drafts/s in the last minute", "dim"),
        ),
        "samples": _line(
            f"{status.samples_accepted:,} accepted  ",
            f"{number(seen.rate('samples_accepted'), '.1f')}/s",
            (f"  {status.samples_refused:,} refused", "yellow" if status.samples_refused else ""),
            (f"  {status.samples_evicted:,} evicted", "yellow" if status.samples_evicted else ""),
        ),
        "replay": _line(
            f"{mebibytes(status.replay_bytes)} of {mebibytes(status.replay_capacity_bytes)} MiB "
            f"({full:.0f} %)  {status.samples_pending:,} pending"
        ),
        "training": _line(
            f"{state}  loss {loss}  {status.train_steps:,} steps  "
            f"{status.train_steps_skipped:,} skipped  "
            f"{number(seen.rate('tokens_trained'), ',.0f')} tokens/s  "
            f"expected {shares(status.step_acceptance) or DASH}",
            (f"  {clean(status.training_error)}", "bold red"),
        ),
        "gate": _line(gate),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _speed_up(status: pb.TrainerStatus) -> str:
    """Speed-up over no speculation now, or why it is not known; a heading."""
    if status.HasField("speed_up"):
        return f"now, {status.speed_up:.2f}x of generation without speculation where drafts run"
    if not any(drafted.drafts for drafted in status.last_minute):
        return "now, no drafts in the last minute"
    return "now, speed-up not known yet; a fixed draft length needs --time-plain-steps"


def _server_cells(server: console.ServerView) -> list[object]:
    state, drafted = server.state, server.last_minute
    length = drafted.acceptance_length if drafted.HasField("acceptance_length") else None
    return [
        clean(server.address),
        state.draft_version if server.HasField("state") else DASH,
        state.policy_version if state.HasField("policy_version") else DASH,
        number(length),
        _by_position(drafted),
        clean(server.error or state.not_ready),
    ]


def _state_of(server: console.ServerView) -> tuple[str, str]:
    """In words, and their style."""
    if not server.reachable:
        return "unreachable", "bold red"
    if server.state.not_ready:
        return "not ready", "bold red"
    if server.state.speculation_enabled:
        return "ready", "green"
    if server.state.speculation_wanted:
        return "ready, no draft pays", "green"
    return "ready, drafting off", "yellow"


def _by_position(*drafted: console.Drafted) -> str:
    """Shares of the drafts that had a token there."""
    tried = map(sum, zip_longest(*(one.tried_per_position for one in drafted), fillvalue=0))
    accepted = map(sum, zip_longest(*(one.accepted_per_position for one in drafted), fillvalue=0))
    pairs = zip(tried, accepted, strict=False)
    return shares(count / drafts for drafts, count in pairs if drafts) or DASH


def number(value: float | None, form: str = ".3f") -> str:
    """As text, or a dash."""
    return DASH if value is None else format(value, form)


def shares(values: Iterable[float]) -> str:
    """Shares in [0, 1], each in three characters: .92 1.0."""
    texts = (f"{value:.2f}" for value in values)
    return " ".join(text[1:] if text.startswith("0") else "1.0" for text in texts)


def duration(seconds: float) -> str:
    """0:00:45, 3:12:03, 2 days, 3:12:03."""
    return str(timedelta(seconds=max(0, int(seconds))))


def _names(words: Sequence[str], name: str) -> bool:
    return any(word in name for word in words)


def _rule(name: str) -> Rule:
    return Rule(Text(name, "bold cyan"), align="left", style="dim")


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """``pressed(seconds)``: wait so long for q; True when it came. Restores the terminal's mode."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield wait
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return False
        typed = os.read(descriptor, 64)
        return not typed or b"q" in typed.lower()

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
