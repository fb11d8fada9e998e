"""Who belongs to the fleet: a list, a DNS name, a file that somebody keeps, or others who know.

A name service that does not answer says nothing about the fleet, so the last
answer stands until there is another.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

DNS, FILE = "dns:", "file:"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``. Raises ValueError: it is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"not an address of the form host:port: {address!r}")
    return host, int(port)


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
    """Whoever a look-up names now: a DNS name's addresses, a file's lines.

    Args:
        name: for the log.
        look_up: answers ``host:port`` strings; OSError (``socket.gaierror`` too) or
            ValueError where it cannot.
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
        except (OSError, ValueError) as error:
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
    """Members as ``publish.rollout_servers`` names them.

    ``host:port``, ``dns:name:port`` or ``file:path``. Raises ValueError: none of these.
    """
    parts: list[Members] = []
    for entry in entries:
        if entry.startswith(DNS):
            name, port = split_address(entry.removeprefix(DNS))
            parts.append(LookedUpMembers(entry, _dns(name, port)))
        elif entry.startswith(FILE):
            if entry == FILE:
                raise ValueError("file: without a path")
            parts.append(LookedUpMembers(entry, _file(Path(entry.removeprefix(FILE)))))
        else:
            split_address(entry)
            parts.append(StaticMembers([entry]))
    return UnionMembers(parts)


def _dns(name: str, port: int) -> Callable[[], Sequence[str]]:
    """Every address of a name, as a Kubernetes headless service answers."""

    def look_up() -> list[str]:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        hosts = sorted({str(entry[4][0]) for entry in found})
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

    return look_up


def _file(path: Path) -> Callable[[], Sequence[str]]:
    """A ``host:port`` a line, as ``rollout-server fleet`` keeps them; an empty file is nobody.

    Whoever writes it replaces it as a whole: half a file would be half a fleet.
    """

    def look_up() -> list[str]:
        addresses = path.read_text(encoding="utf-8").split()
        for address in addresses:
            split_address(address)
        return addresses

    return look_up
