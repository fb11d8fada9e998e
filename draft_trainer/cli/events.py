"""``draft-trainer events``: what happened, and what happens."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import grpc
from tyro.conf import arg

from draft_trainer.cli.trainer import Connection, as_dict, at_least, explained, plain, when
from slipstream.v1 import console_pb2 as pb

CALL_SECONDS = 3600.0
RETRY_SECONDS = 1.0
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@dataclass(frozen=True, kw_only=True)
class Events(Connection):
    """What happened, and with --follow what happens.

    Prints the newest events, oldest first. With --follow it goes on until it is interrupted, over
    restarts of the trainer, without a gap or a repetition.
    """

    follow: Annotated[bool, arg(aliases=["-f"])] = False
    """Go on with what happens."""
    newest: Annotated[int, arg(metavar="N")] = 20
    """Of those that are kept, so many; 0: all that are kept, the newest 1000."""
    after: Annotated[int, arg(metavar="NUMBER")] = 0
    """Only events with a higher number."""
    json: bool = False
    """One JSON object a line."""

    def run(self) -> int:
        """Prints them."""
        at_least("--newest", self.newest, 0)
        at_least("--after", self.after, 0)
        for event in self._wanted():
            print(_json_line(event) if self.json else _line(event), flush=True)
        return 0

    def _wanted(self) -> Iterator[pb.Event]:
        request = pb.WatchEventsRequest(after=self.after, newest=self.newest, follow=self.follow)
        timeout = CALL_SECONDS if self.follow else self.timeout
        connected = absent = False
        with self.trainer() as stub:
            while True:
                try:
                    for event in stub.WatchEvents(request, timeout=timeout):
                        connected, absent = True, False
                        request.after, request.newest = event.number, 0
                        yield event
                except grpc.RpcError as error:
                    code = error.code() if isinstance(error, grpc.Call) else None
                    if not (self.follow and connected and code in _GONE):
                        raise
                    if code is not grpc.StatusCode.DEADLINE_EXCEEDED and not absent:
                        absent = True
                        text = explained(error, self.address)
                        print(f"draft-trainer: {text}; trying again", file=sys.stderr, flush=True)
                if not self.follow:
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
