"""The rollout servers, and concurrent calls to several of them.

Every call has a deadline, and calls to several servers run in parallel. What happened is decided by
an answer or, where the answer was lost, by reading the server's state; never by assuming.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from draft_trainer.config import PublishConfig
from draft_trainer.drafters.acceptance import Method
from draft_trainer.ingest.run import Run
from draft_trainer.releases.client import DraftPayload, Failure, RolloutClient, drafts_wanted
from draft_trainer.releases.members import Members
from draft_trainer.releases.registry import Registry
from slipstream.errors import RefusedError
from slipstream.security import NONE, ClientCredentials
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)

T = TypeVar("T")

ASSUMED = (3, "probabilistic")
"""How a fleet drafts of which no server has answered yet: rollout-server's defaults."""


class Quorum:
    """How long to wait for the rest once enough servers have done something.

    Args:
        needed: servers that are enough.
        patience: seconds for the others from then on; infinite: they are waited for.
    """

    def __init__(self, needed: int, patience: float) -> None:
        self.needed = needed
        self.patience = patience
        self.over_at = math.inf
        self._done = 0
        self.clock = time.monotonic

    def count(self, done: bool) -> None:
        """One more server answered, and did it or did not."""
        self._done += done
        if self._done >= self.needed and self.over_at == math.inf:
            self.over_at = self.clock() + self.patience

    @property
    def late(self) -> Failure:
        """In place of an answer that had not come when it was over."""
        text = f"no answer {self.patience:g} s after {self.needed} servers had done it"
        return Failure(text, grpc.StatusCode.DEADLINE_EXCEEDED)


class Calls(Generic[T]):
    """Calls in progress in a pool's threads, and their answers in the order in which they end."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._ended: queue.SimpleQueue[tuple[str, Future[T]]] = queue.SimpleQueue()

    def start(self, name: str, call: Callable[[], T]) -> None:
        """Begin one as soon as a thread is free."""
        future = self._pool.submit(call)
        future.add_done_callback(lambda future: self._ended.put((name, future)))

    def next(self, quorum: Quorum | None = None) -> tuple[str, T] | None:
        """Wait for the next one's name and answer; None when ``quorum`` is over."""
        wait = None
        if quorum is not None and quorum.over_at < math.inf:
            wait = max(0.0, quorum.over_at - quorum.clock())
        try:
            name, future = self._ended.get(timeout=wait)
        except queue.Empty:
            return None
        return name, future.result()


class Fleet:
    """The rollout servers there are now. Owns the clients and the threads that ask them."""

    MAX_CALLS = 2048
    """At a time; threads exist as calls do. While a release spreads, a thread waits for every
    server that fetches: with fewer, most of 10,000 servers wait for a thread."""

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
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()
        self._clients: dict[str, RolloutClient] = {}
        self._refused: frozenset[str] = frozenset()
        self._states: dict[str, pb.ServerState] = {}
        self._said: tuple[int, str] = ASSUMED
        self._pool = ThreadPoolExecutor(self.MAX_CALLS, thread_name_prefix="fleet")
        self.refresh()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the servers that belong to the fleet."""
        with self._lock:
            return tuple(self._clients)

    def drafting(self) -> tuple[int, Method]:
        """Tokens that the fleet drafts a step and how: as configured, else as its servers say."""
        tokens, method = self._said
        sampled: Method = "greedy" if method == "greedy" else "probabilistic"
        config = self.config
        return config.num_speculative_tokens or tokens, config.draft_sample_method or sampled

    def refresh(self) -> tuple[str, ...]:
        """Look again who belongs to it; returns the addresses, without those that may not be asked:
        the token would cross a network readable."""
        with self._refreshing:
            wanted = self._members.addresses()
        refused: dict[str, RefusedError] = {}
        with self._lock:
            gone = [self._clients.pop(a) for a in list(self._clients) if a not in wanted]
            for address in wanted:
                try:
                    if address not in self._clients:
                        self._clients[address] = RolloutClient(
                            address, self.config, self._credentials, self._trainer
                        )
                except RefusedError as error:
                    refused[address] = error
            new, self._refused = refused.keys() - self._refused, frozenset(refused)
        for address in new:
            logger.warning("%s is left out: %s", address, refused[address])
        for client in gone:
            client.close()
        return self.addresses

    def client(self, address: str) -> RolloutClient:
        """One server. Of one that has left, a client whose calls all fail."""
        with self._lock:
            client = self._clients.get(address)
        if client is None:
            client = RolloutClient(address, self.config, self._credentials, self._trainer)
            client.close()
        return client

    def calls(self) -> Calls[Any]:
        """What is asked of servers in parallel."""
        return Calls(self._pool)

    def each(
        self,
        ask: Callable[[RolloutClient], T],
        addresses: Iterable[str] | None = None,
        quorum: Quorum | None = None,
    ) -> dict[str, T]:
        """Ask servers in parallel and wait for all; every ``ask`` ends by its own deadlines.

        Without those that have not answered when ``quorum``, which counts true answers, is over.
        """
        chosen = self.addresses if addresses is None else tuple(addresses)
        calls: Calls[T] = self.calls()
        for address in chosen:
            calls.start(address, partial(ask, self.client(address)))
        answers: dict[str, T] = {}
        while len(answers) < len(chosen) and (ended := calls.next(quorum)) is not None:
            address, answer = ended
            answers[address] = answer
            if quorum is not None:
                quorum.count(bool(answer))
        return {address: answers[address] for address in chosen if address in answers}

    def sources(self, draft: DraftPayload) -> list[str]:
        """Servers that fetch from others and serve this release, as they said last."""
        with self._lock:
            states = dict(self._states)
        return [a for a, s in states.items() if s.fetches and s.draft_sha256 == draft.sha256]

    def any_ready(self, addresses: Iterable[str]) -> bool:
        """Whether one of these servers answered when it was asked last, and was ready."""
        with self._lock:
            said = [self._states[address] for address in addresses if address in self._states]
        return any(not state.not_ready for state in said)

    def states(self, read_back: bool = False) -> dict[str, pb.ServerState | Failure]:
        """What every server serves now."""
        states = self.each(lambda client: client.state(read_back))
        reached = {a: state for a, state in states.items() if not isinstance(state, Failure)}
        with self._lock:
            self._states = reached
        said = [(s.num_speculative_tokens, s.draft_sample_method) for s in reached.values()]
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
            address: [i for i in state.staged if i.startswith("draft-") and i not in staged]
            for address, state in states.items()
            if not isinstance(state, Failure)
        }
        strays = {address: ids for address, ids in strays.items() if ids}
        if strays:
            self.each(lambda client: client.abort(strays[client.address]), strays)

    def close(self) -> None:
        """Close every channel, then end the threads (their calls fail at once)."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


class DraftLag:
    """Turns speculation off where a server's draft is more than ``max_lag`` policy versions behind.

    Off before the policy goes live, on again after a draft that is fresh enough: the gap costs
    speed, and no rollout uses a draft staler than configured. 0: no limit.
    """

    def __init__(self, max_lag: int, registry: Registry, run: Callable[[], Run | None]) -> None:
        """``run`` is the one that is fed; None before the first."""
        self.max_lag = max_lag
        self._registry = registry
        self._run = run
        self._policy_version: int | None = None
        self._lock = threading.Lock()
        self._told: dict[str, bool] = {}
        self._failed: dict[str, str] = {}

    def fresh(self, state: pb.ServerState, policy_version: int | None = None) -> bool | None:
        """Whether a server's draft may propose for ``policy_version`` (the one it has now).

        A draft that was trained against no policy version of this run (release 0, or another
        run's) counts as trained against the run's first one. None before that is announced: what
        the server has may be a version of the run before. A policy without a version has no lag.
        """
        if policy_version is None:
            policy_version = (
                state.policy_version if state.HasField("policy_version") else self._policy_version
            )
        if not self.max_lag or policy_version is None:
            return True
        against = self._against(state)
        return None if against is None else policy_version - against <= self.max_lag

    def _against(self, state: pb.ServerState) -> int | None:
        run = self._run()
        run_id, first = ("", None) if run is None else (run.run_id, run.first_policy_version)
        try:
            against = self._registry.trained_against(state.draft_version, run_id)
        except RefusedError:
            # No release of this registry, or a damaged one.
            known = state.HasField("trained_against_policy_version")
            against = state.trained_against_policy_version if known else None
        return first if against is None else against

    def before_policy(self, fleet: Fleet, policy_version: int) -> None:
        """Turn speculation off on servers whose draft will be too old for this policy."""
        # Servers whose policy the framework syncs itself report no version of it.
        self._policy_version = policy_version

        def ask(client: RolloutClient) -> None:
            state = client.state()
            if not isinstance(state, Failure) and self.fresh(state, policy_version) is False:
                self._set(client, state, enabled=False)

        if self.max_lag:
            fleet.each(ask)

    def apply(self, fleet: Fleet, states: Mapping[str, pb.ServerState | Failure | None]) -> None:
        """Bring the servers' speculation in line with what they serve."""
        known = {a: s for a, s in states.items() if isinstance(s, pb.ServerState)}
        with self._lock:
            self._told = {a: told for a, told in self._told.items() if a in known}
        if self.max_lag:
            fresh = {a: fresh for a, s in known.items() if (fresh := self.fresh(s)) is not None}
            fleet.each(lambda c: self._set(c, known[c.address], fresh[c.address]), fresh)

    def _set(self, client: RolloutClient, state: pb.ServerState, enabled: bool) -> None:
        # A server that may draft and does not has found that it does not pay.
        drafts = drafts_wanted(state)
        if self._told.get(client.address) == enabled and enabled >= drafts:
            return
        failure = client.set_speculation(enabled)
        if failure is not None:
            # Asked again in every round; said once.
            if self._failed.get(client.address) != failure.text:
                self._failed[client.address] = failure.text
                switch = "on" if enabled else "off"
                logger.warning("speculation was not turned %s: %s", switch, failure.text)
            return
        self._failed.pop(client.address, None)
        # Commits and the reconciler apply it at the same time.
        with self._lock:
            self._told[client.address] = enabled
        if drafts != enabled:
            switched = f"{'on' if enabled else 'off'} for draft {state.draft_version}"
            against = self._against(state)
            logger.warning(
                "%s: speculation %s, trained against policy %s", client.address, switched, against
            )
