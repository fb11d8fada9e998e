"""``draft-trainer events``: what happened, and what happens."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc

from draft_trainer.cli.output import as_dict, plain, when
from draft_trainer.cli.trainer import add_address, explain, trainer
from slipstream.v1 import console_pb2 as pb

CALL_SECONDS = 3600.0
RETRY_SECONDS = 1.0
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "events",
        help="what happened, and with --follow what happens",
        description="Prints the newest events, oldest first. With --follow it goes on until it is "
        "interrupted, over restarts of the trainer, without a gap or a repetition.",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="go on with what happens")
    parser.add_argument(
        "--newest",
        type=_count,
        default=20,
        metavar="N",
        help="of those that are kept, so many (default: 20; 0: all kept, the newest 1000)",
    )
    parser.add_argument(
        "--after",
        type=_count,
        default=0,
        metavar="NUMBER",
        help="only events with a higher number (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    add_address(parser)
    parser.set_defaults(run=_events)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _events(arguments: argparse.Namespace) -> int:
    show = _json_line if arguments.json else _line
    for event in _wanted(arguments):
        print(show(event), flush=True)
    return 0


def _wanted(arguments: argparse.Namespace) -> Iterator[pb.Event]:
    request = pb.WatchEventsRequest(
        after=arguments.after, newest=arguments.newest, follow=arguments.follow
    )
    connected = absent = False
    with trainer(arguments) as stub:
        while True:
            timeout = CALL_SECONDS if arguments.follow else arguments.timeout
            try:
                for event in stub.WatchEvents(request, timeout=timeout):
                    connected, absent = True, False
                    request.after, request.newest = event.number, 0
                    yield event
            except grpc.RpcError as error:
                code = error.code() if isinstance(error, grpc.Call) else None
                if not (arguments.follow and connected and code in _GONE):
                    raise
                if code is not grpc.StatusCode.DEADLINE_EXCEEDED and not absent:
                    absent = True
                    text = explain(error, arguments.address)
                    print(f"draft-trainer: {text}; trying again", file=sys.stderr, flush=True)
            if not arguments.follow:
                return
            time.sleep(RETRY_SECONDS)


def kind_name(event: pb.Event) -> str:
    """``committed``, ``server_unreachable`` and so on; a number for a kind of a newer trainer."""
    if event.kind not in pb.EventKind.values():
        return f"kind_{event.kind}"
    return pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower()


def described(event: pb.Event) -> str:
    """What it is about, in one line for people."""
    parts = []
    if event.HasField("draft_version"):
        parts.append(f"draft {event.draft_version}")
    if event.HasField("policy_version"):
        parts.append(f"policy {event.policy_version}")
    if event.server:
        parts.append(plain(event.server))
    text = ", ".join(parts)
    reason = plain(event.reason)
    return f"{text}: {reason}" if text and reason else text or reason


def _line(event: pb.Event) -> str:
    return f"{when(event.time)}  {kind_name(event):22}{described(event)}".rstrip()


def _json_line(event: pb.Event) -> str:
    return json.dumps({**as_dict(event), "kind": kind_name(event)}, ensure_ascii=False)
