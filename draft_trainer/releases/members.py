"""Membership of the fleet: addresses, DNS names and membership files, looked up repeatedly."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from draft_trainer.config import DNS, FILE
from slipstream.client import join_address, split_address

logger = logging.getLogger(__name__)


class Members:
    """Rollout-server discovery: addresses, DNS names, membership files. One look at a time.

    A name service that does not answer, or a file that is no list of addresses, says nothing about
    the fleet: its last answer stays in force until there is another.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._known: dict[str, tuple[str, ...]] = {
            entry: () if entry.startswith((DNS, FILE)) else (entry,) for entry in entries
        }
        self._failed: set[str] = set()

    @property
    def known(self) -> tuple[str, ...]:
        """What the last looks said. Any thread may ask, also during a look."""
        return tuple(dict.fromkeys(a for known in self._known.values() for a in known))

    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of every control plane, each once. Never raises."""
        for entry in self._known:
            try:
                self._known[entry] = tuple(look_up(entry))
                self._failed.discard(entry)
            except (OSError, ValueError) as error:
                if entry not in self._failed:
                    logger.warning("%s: %s; keeping %s", entry, error, list(self._known[entry]))
                self._failed.add(entry)
        return self.known


def look_up(entry: str) -> list[str]:
    """The addresses that an entry stands for now.

    A file holds a ``host:port`` a line and is replaced as a whole; an empty one is an empty fleet.

    Raises:
        OSError: no name service (``socket.gaierror``) or no such file.
        ValueError: the file is no list of addresses.
    """
    if entry.startswith(DNS):
        name, port = split_address(entry.removeprefix(DNS))
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        hosts = sorted({str(info[4][0]) for info in found})
        return [join_address(host, port) for host in hosts]
    if entry.startswith(FILE):
        addresses = Path(entry.removeprefix(FILE)).read_text(encoding="utf-8").split()
        for address in addresses:
            split_address(address)
        return addresses
    return [entry]
