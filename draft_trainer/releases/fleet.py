"""The rollout servers: who they are now, and concurrent calls to several of them.

Every call has a deadline, and calls to several servers run in parallel. What happened is decided by
an answer or, where the answer was lost, by reading the server's state; never by assuming.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from draft_trainer.config import DNS, FILE, PublishConfig
from draft_trainer.drafters.expected_acceptance import Method
from draft_trainer.releases.rollout_client import Failure, RolloutClient
from slipstream.client import join_address, split_address
from slipstream.errors import RefusedError, StatusCode
from slipstream.serving.identity import NONE, ClientCredentials
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_UP_SECONDS = 1.0
"""Longest wait for who belongs to the fleet now: a name service may answer late, or never."""

ASSUMED = (3, "probabilistic")
"""The drafting of a fleet of which no server has answered yet: rollout-server's defaults."""


LEFT_SECONDS = 60.0
"""A list of members may lack a server for a moment: for so long, what is asked of it goes on."""

STAGES_AT_ONCE = 16
"""Servers that a release is sent to at a time: its bytes leave the trainer once for each."""

WITHOUT_WEIGHTS = frozenset({"ngram", "none"})
"""Kinds of drafts (``ServerState.draft_kind``) of which no release can be staged."""


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
        """The members that the last looks found. Any thread may ask, also during a look."""
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


class Fleet:
    """The rollout servers there are now. Owns the clients and the threads that ask them."""

    MAX_CALLS = 2048
    """Calls at a time; threads exist as they do. A policy that vLLM's weight transfer brings is
    received within the commits: with fewer threads than servers they would wait for each other."""

    def __init__(
        self,
        config: PublishConfig,
        on_states: Callable[[Mapping[str, pb.ServerState | Failure]], None] = lambda states: None,
        credentials: ClientCredentials = NONE,
        trainer: str = "",
    ) -> None:
        """``trainer`` is its ``State.owner``: servers that belong to another one refuse it."""
        self.config = config
        self._trainer = trainer
        self._on_states = on_states
        self._members = Members(config.rollout_servers)
        self._credentials = credentials
        self._looking: threading.Thread | None = None
        self._lock = threading.Lock()
        self._clients: dict[str, RolloutClient] = {}
        self._left: dict[str, tuple[float, RolloutClient]] = {}
        self._refused: frozenset[str] = frozenset()
        self._said: tuple[int, str] = ASSUMED
        self._pool = ThreadPoolExecutor(self.MAX_CALLS, thread_name_prefix="fleet")
        self.staging = threading.BoundedSemaphore(STAGES_AT_ONCE)
        # Nothing is known yet: without servers a bridge could not push.
        self._follow(self._members.addresses())

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the servers that belong to the fleet."""
        with self._lock:
            return tuple(self._clients)

    def drafting(self) -> tuple[int, Method]:
        """Tokens that the fleet drafts a step and how: as configured, else as its servers say."""
        tokens, method = self._said
        sampled: Method = "greedy" if method == "greedy" else "probabilistic"
        config = self.config
        return config.num_speculative_tokens or tokens, config.draft_sample_method or sampled

    def refresh(self) -> tuple[str, ...]:
        """Look again who belongs to it, for ``LOOK_UP_SECONDS`` at most; returns the addresses then
        known, without those that may not be asked: the token would cross a network readable."""
        with self._lock:
            if self._looking is None or not self._looking.is_alive():
                # Nothing can end a look-up that hangs; the process ends without it.
                self._looking = threading.Thread(
                    target=self._members.addresses, name="members", daemon=True
                )
                self._looking.start()
            looking = self._looking
        looking.join(LOOK_UP_SECONDS)
        self._follow(self._members.known)
        return self.addresses

    def _follow(self, wanted: Sequence[str]) -> None:
        refused: dict[str, RefusedError] = {}
        with self._lock:
            now = time.monotonic()
            for address in self._clients.keys() - set(wanted):
                self._left[address] = now, self._clients.pop(address)
            for address in wanted:
                try:
                    if address not in self._clients:
                        _, back = self._left.pop(address, (now, None))
                        self._clients[address] = back or RolloutClient(
                            address, self.config, self._credentials, self._trainer
                        )
                except RefusedError as error:
                    refused[address] = error
            late = [a for a, (since, _) in self._left.items() if now - since > LEFT_SECONDS]
            gone = [self._left.pop(address)[1] for address in late]
            new, self._refused = refused.keys() - self._refused, frozenset(refused)
        for address in new:
            logger.warning("%s is left out: %s", address, refused[address])
        for client in gone:
            client.close()

    def client(self, address: str) -> RolloutClient:
        """One server. Of one that has left for a while, a client whose calls all fail."""
        with self._lock:
            _, left = self._left.get(address, (0.0, None))
            client = self._clients.get(address, left)
        if client is None:
            client = RolloutClient(address, self.config, self._credentials, self._trainer)
            client.close()
        return client

    def each(
        self, ask: Callable[[RolloutClient], T], addresses: Iterable[str] | None = None
    ) -> dict[str, T]:
        """Ask servers in parallel and wait for all; every ``ask`` ends by its own deadlines."""
        chosen = self.addresses if addresses is None else tuple(addresses)
        asked = {address: self._pool.submit(ask, self.client(address)) for address in chosen}
        return {address: future.result() for address, future in asked.items()}

    def start(self, ask: Callable[[RolloutClient], object], addresses: Iterable[str]) -> None:
        """Ask servers without waiting for an answer."""
        for address in addresses:
            self._pool.submit(ask, self.client(address))

    def states(self, read_back: bool = False) -> dict[str, pb.ServerState | Failure]:
        """Ask every server what it serves now."""
        states = self.each(lambda client: client.state(read_back))
        failed = {a: s.code for a, s in states.items() if isinstance(s, Failure)}
        late = [a for a, code in failed.items() if code is StatusCode.DEADLINE_EXCEEDED]
        if read_back and late:
            # A look into memory waits for a commit under way.
            states |= self.each(lambda client: client.state(), late)
        reached = [state for state in states.values() if not isinstance(state, Failure)]
        drafting = [s for s in reached if s.draft_kind not in WITHOUT_WEIGHTS]
        said = [(s.num_speculative_tokens, s.draft_sample_method) for s in drafting]
        self._said = max((one for one in said if one[0]), default=self._said)
        self._on_states(states)
        return states

    def abort_strays(
        self, states: Mapping[str, pb.ServerState | Failure], staged: Collection[str] = ()
    ) -> None:
        """Abort drafts that wait on a server for a commit that will not come: they hold memory.

        A trainer that died leaves them, and a connection that was cut before its abort.
        """
        strays = {
            address: [
                stage.stage_id
                for stage in state.staged
                if stage.kind == pb.STAGE_KIND_DRAFT and stage.stage_id not in staged
            ]
            for address, state in states.items()
            if not isinstance(state, Failure)
        }
        strays = {address: ids for address, ids in strays.items() if ids}
        if strays:
            self.each(lambda client: client.abort(strays[client.address]), strays)

    def close(self) -> None:
        """Close every channel, then end the threads (their calls fail at once)."""
        with self._lock:
            clients = [*self._clients.values(), *(client for _, client in self._left.values())]
            self._clients, self._left = {}, {}
        for client in clients:
            client.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
