"""Who may call what: every method of both services has exactly one role.

Kept with the wire because both servers enforce it and a client must be able to look it up.
``tests/security/test_roles.py`` fails when a method is added to a service and not to this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """What a token or a certificate opens."""

    FEED = "feed"
    OBSERVE = "observe"
    OPERATE = "operate"


GRANTS: Mapping[Role, frozenset[Role]] = {
    # Whoever feeds or operates asks for states on the way; the two know nothing of each other.
    Role.FEED: frozenset({Role.FEED, Role.OBSERVE}),
    Role.OBSERVE: frozenset({Role.OBSERVE}),
    Role.OPERATE: frozenset({Role.OPERATE, Role.OBSERVE}),
}
"""What the holder of a role may do: calls of these roles."""

_TRAINER: Mapping[str, Role] = {
    "OpenRun": Role.FEED,
    "StreamStates": Role.FEED,
    "AnnouncePolicy": Role.FEED,
    "PrepareSync": Role.FEED,
    "CompleteSync": Role.FEED,
    "ListReleases": Role.OBSERVE,
    "FetchRelease": Role.OBSERVE,
    "GetStatus": Role.OBSERVE,
    "WatchStatus": Role.OBSERVE,
    "ListVerdicts": Role.OBSERVE,
    "GetHistory": Role.OBSERVE,
    "WatchEvents": Role.OBSERVE,
    "PromoteRelease": Role.OPERATE,
    "RollBackRelease": Role.OPERATE,
    "PinRelease": Role.OPERATE,
    "ImportRelease": Role.OPERATE,
}
_ROLLOUT: Mapping[str, Role] = {
    "Stage": Role.OPERATE,
    "Commit": Role.OPERATE,
    "Abort": Role.OPERATE,
    "RollBack": Role.OPERATE,
    "SetSpeculation": Role.OPERATE,
    "GetState": Role.OBSERVE,
    "WatchAcceptance": Role.OBSERVE,
}

METHODS: Mapping[str, Role | None] = {
    **{f"/slipstream.v1.DraftTrainer/{name}": role for name, role in _TRAINER.items()},
    **{f"/slipstream.v1.RolloutServer/{name}": role for name, role in _ROLLOUT.items()},
    # Probes have no credentials, and what they learn is whether a port serves.
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.OBSERVE,
}
"""Role by full method name; None is open to everybody. What is not here is open to nobody."""


def roles_granted(roles: frozenset[Role]) -> frozenset[Role]:
    """Every role whose calls the holder of ``roles`` may make."""
    return frozenset(granted for role in roles for granted in GRANTS[role])
