"""Who belongs to the fleet: a list, a DNS name, or somebody else who knows.

A name service that does not answer says nothing about the fleet, so the last
answer stands until there is another.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

DNS = "dns:"


class Members(Protocol):
    """Asked before every publish and at every round of the reconciler. Thread-safe."""

    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of every control plane, each once. Never raises."""
        ...


class StaticMembers:
    """A list that does not change."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    def addresses(self) -> tuple[str, ...]:
        """The list."""
        return self._addresses


class LookedUpMembers:
    """Whoever a look-up names now: a DNS name's addresses, a Ray actor's list.

    Args:
        name: for the log.
        look_up: answers ``host:port`` strings; OSError (``socket.gaierror`` too) or
            LookupError where it cannot. Ray goes in here: a function that asks the
            actor of that name.
    """

    def __init__(self, name: str, look_up: Callable[[], Sequence[str]]) -> None:
        self._name = name
        self._look_up = look_up
        self._known: tuple[str, ...] = ()
        self._failed = False

    def addresses(self) -> tuple[str, ...]:
        """As of the last look-up that succeeded."""
        try:
            self._known = tuple(dict.fromkeys(self._look_up()))
            self._failed = False
        except (OSError, LookupError) as error:
            if not self._failed:
                logger.warning("%s: %s; keeping %s", self._name, error, list(self._known))
            self._failed = True
        return self._known


class UnionMembers:
    """All of several."""

    def __init__(self, parts: Sequence[Members]) -> None:
        self._parts = tuple(parts)

    def addresses(self) -> tuple[str, ...]:
        """Each address once."""
        return tuple(dict.fromkeys(a for part in self._parts for a in part.addresses()))


def members_of(entries: Sequence[str]) -> Members:
    """Members as ``publish.rollout_servers`` names them: ``host:port`` or ``dns:name:port``."""
    parts: list[Members] = []
    for entry in entries:
        if entry.startswith(DNS):
            name, _, port = entry.removeprefix(DNS).rpartition(":")
            parts.append(LookedUpMembers(entry, _dns(name, int(port))))
        else:
            parts.append(StaticMembers([entry]))
    return UnionMembers(parts)


def _dns(name: str, port: int) -> Callable[[], Sequence[str]]:
    """Every address of a name, as a Kubernetes headless service answers."""

    def look_up() -> list[str]:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        hosts = sorted({str(entry[4][0]) for entry in found})
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

    return look_up
