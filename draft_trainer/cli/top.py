"""``draft-trainer top``: a running trainer in a terminal, live."""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from draft_trainer.cli.trainer import add_address, explain, trainer
from slipstream.errors import RefusedError
from slipstream.v1 import console_pb2
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

EVENTS = 50
LIVE_TIMEOUT = 2.0
KEY_SECONDS = 0.25
HISTORY_SECONDS = 5.0


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "top",
        help="a running trainer, live in the terminal",
        description="Draws fleet, acceptance, ingest, training, gate and the newest events, and "
        "draws them again every second. q ends it.",
    )
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds between two pictures, 0.2 to 60 (default: 1)",
    )
    add_address(parser, timeout=10.0)
    parser.set_defaults(run=_top)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.2 <= value <= 60.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.2 to 60")
    return value


def _top(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from draft_trainer.cli.frame import Seen, frame

    console = Console(highlight=False, soft_wrap=True)
    if not arguments.once and not console.is_terminal:
        raise RefusedError("stdout", "no terminal", "a terminal", "use --once for scripts")
    with trainer(arguments) as stub:
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=arguments.timeout)
        seen = Seen(arguments.address, status, console_pb2.History())
        _ask_past(stub, seen, arguments.timeout)
        if arguments.once:
            for line in frame(seen, console.width, None, time.time()):
                console.print(line)
            return 0
        _live(console, stub, seen, arguments.interval)
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
        seen.error = f"no answer for {age:.0f} s, trying again. {explain(error, seen.address)}"


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
