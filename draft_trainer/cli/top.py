"""``draft-trainer top``: a running trainer in a terminal, live."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import grpc
from tyro.conf import arg

from draft_trainer.cli.trainer import Connection, explained
from slipstream.errors import RefusedError
from slipstream.v1 import console_pb2
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

EVENTS = 50
LIVE_TIMEOUT = 2.0
KEY_SECONDS = 0.25
HISTORY_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Top(Connection):
    """A running trainer, live in the terminal.

    Draws fleet, acceptance, ingest, training, gate and the newest events, and draws them again
    every second. q ends it.
    """

    timeout: Annotated[float, arg(metavar="S")] = 10.0
    """Seconds to wait for the answer."""
    once: bool = False
    """Print it once and end."""
    interval: Annotated[float, arg(metavar="S")] = 1.0
    """Seconds between two pictures, 0.2 to 60."""

    def run(self) -> int:
        """Draws until q is pressed."""
        from rich.console import Console

        from draft_trainer.cli.frame import Seen, frame

        if not 0.2 <= self.interval <= 60.0:
            raise RefusedError("--interval", self.interval, "0.2 to 60", "choose from that range")
        console = Console(highlight=False, soft_wrap=True)
        if not self.once and not console.is_terminal:
            raise RefusedError("stdout", "no terminal", "a terminal", "use --once for scripts")
        with self.trainer() as stub:
            status = stub.GetStatus(pb.GetStatusRequest(), timeout=self.timeout)
            seen = Seen(self.address, status, pb.History())
            _ask_past(stub, seen, self.timeout)
            if self.once:
                for line in frame(seen, console.width, None, time.time()):
                    console.print(line)
            else:
                _live(console, stub, seen, self.interval)
        return 0


def _live(console: Any, stub: pb_grpc.DraftTrainerStub, seen: Any, interval: float) -> None:
    from rich.console import Group

    from draft_trainer.cli.frame import frame

    def picture() -> Group:
        return Group(*frame(seen, console.width, console.height, time.time()))

    asked = past = time.monotonic()
    size = console.size
    with _keys() as pressed, _drawing(console, picture()) as live:
        try:
            while not pressed(KEY_SECONDS):
                now = time.monotonic()
                due = now - asked >= interval
                if not due and console.size == size:
                    continue
                if due:
                    asked = now
                    _ask(stub, seen, with_past=now - past >= HISTORY_SECONDS)
                    past = now if now - past >= HISTORY_SECONDS else past
                size = console.size
                live.update(picture(), refresh=True)
        except KeyboardInterrupt:
            return


def _drawing(console: Any, first: Any) -> Any:
    from rich.live import Live

    return Live(first, console=console, screen=True, auto_refresh=False)


def _ask(stub: pb_grpc.DraftTrainerStub, seen: Any, with_past: bool) -> None:
    """The newest; where there is no answer, what was known stays and says so."""
    try:
        seen.status = stub.GetStatus(pb.GetStatusRequest(), timeout=LIVE_TIMEOUT)
        if with_past or seen.error:
            _ask_past(stub, seen, LIVE_TIMEOUT)
        seen.error, seen.asked_at = "", time.time()
    except grpc.RpcError as error:
        age = time.time() - seen.asked_at
        seen.error = f"no answer for {age:.0f} s, trying again. {explained(error, seen.address)}"


def _ask_past(stub: pb_grpc.DraftTrainerStub, seen: Any, timeout: float) -> None:
    seen.history = stub.GetHistory(console_pb2.GetHistoryRequest(), timeout=timeout)
    request = console_pb2.WatchEventsRequest(newest=EVENTS)
    seen.events = list(stub.WatchEvents(request, timeout=timeout))


@contextmanager
def _keys() -> Iterator[Any]:
    """``pressed(seconds)``: wait so long for q; True when it came. The terminal is put back."""
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
