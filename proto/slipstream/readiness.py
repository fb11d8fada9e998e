"""The words for people of why a rollout server is not ready; nothing is decided by them."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.errors import clean
from slipstream.v1 import rollout_server_pb2 as pb


def not_ready_text(found: Iterable[pb.NotReady]) -> str:
    """Say in one line why a server should get no requests; empty where it may get them."""
    return clean("; ".join(map(_words, found)))


def _words(one: pb.NotReady) -> str:
    draft = one.draft_version
    if one.reason == pb.NOT_READY_REASON_NOTHING_ACCEPTED:
        length = f"{one.acceptance_length:.2f} over {one.drafts} drafts"
        return f"acceptance length of draft {draft} is {length}"
    if one.reason == pb.NOT_READY_REASON_NOT_IN_MEMORY:
        return _read_back(one, "differs")
    if one.reason == pb.NOT_READY_REASON_ASLEEP:
        return _read_back(one, "asleep")
    if one.reason == pb.NOT_READY_REASON_OTHER_DRAFT:
        another = "another " if draft == one.fleet_draft_version else ""
        return f"serves {another}draft {draft}, the fleet {one.fleet_draft_version}"
    return f"reason {one.reason}, which this version of slipstream does not know"


def _read_back(one: pb.NotReady, found: str) -> str:
    workers = ", ".join(f"worker {worker}: {found}" for worker in one.workers)
    return f"draft read back from memory: {workers}"
