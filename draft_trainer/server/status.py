"""The trainer's status and its past as messages: put together from all who know a part.

Live acceptance over policy versions, by release, and the newest minutes of each server.

Counts, never means: what is merged to save room still gives the exact acceptance length
of what it covers, and where there were no drafts there is nothing to divide.

The trainer's counters, read every few seconds: the recent past whole, the rest thinned.

When policy versions were announced, and since when a draft is behind them.

The fleet as the trainer last saw it, and an event for everything that changed in it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from draft_trainer.counters import Counters, by_label, total
from draft_trainer.ingest.rings import Rings
from draft_trainer.ingest.run import Run, Runs, Session
from draft_trainer.ingest.store import SampleStore
from draft_trainer.releases.fleet import Failure
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.state import Events, GateResults, Trial
from slipstream.errors import RefusedError
from slipstream.metrics import code_version
from slipstream.v1 import console_pb2, release_pb2
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import rollout_server_pb2 as rollout_pb

MAX_CELLS = 1024
"""Of all releases together; beyond, neighbouring policy versions are merged in pairs."""

SLOT_SECONDS = 5.0
MAX_SLOTS = 60
MAX_SERVERS = 1024
MINUTE = 60.0


@dataclass
class Counted:
    """Verification steps, and the tokens accepted at each position of them."""

    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, drafts: int, accepted: Sequence[int]) -> None:
        """Count more."""
        self.drafts += drafts
        self.accepted += [0] * (len(accepted) - len(self.accepted))
        for place, count in enumerate(accepted):
            self.accepted[place] += count


@dataclass
class _Cell(Counted):
    first_policy: int | None = None
    last_policy: int | None = None
    first_time: float = 0.0
    last_time: float = 0.0


@dataclass
class _Slot(Counted):
    number: int = 0
    releases: dict[int, Counted] = field(default_factory=dict)


class AcceptanceHistory:
    """Fed by ``AcceptanceWatch``. Thread-safe; bounded.

    Args:
        policy_version: the newest that the trainer knows, for servers that report none.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        policy_version: Callable[[], int | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy_version = policy_version
        self._clock = clock
        self._lock = threading.Lock()
        self._cells: dict[int, list[_Cell]] = {}
        self._slots: dict[str, deque[_Slot]] = {}
        self._total = Counted()

    def grew(
        self,
        address: str,
        state: rollout_pb.ServerState,
        version: int,
        drafts: int,
        accepted: Sequence[int],
    ) -> None:
        """A server's counters of one release moved on.

        Args:
            address: of the server.
            state: that came with the counters. What was drafted while it changed its policy
                counts for the later version: up to one report's 100 ms.
            version: the release.
            drafts: verification steps since the last report.
            accepted: of those, at each position.
        """
        reported = state.HasField("policy_version")
        policy = state.policy_version if reported else self._policy_version()
        now = self._clock()
        with self._lock:
            self._total.add(drafts, accepted)
            self._cell(version, policy, now).add(drafts, accepted)
            slot = self._slot(address, int(now // SLOT_SECONDS))
            slot.add(drafts, accepted)
            slot.releases.setdefault(version, Counted()).add(drafts, accepted)

    @property
    def total(self) -> tuple[int, tuple[int, ...]]:
        """Verification steps since the start, and what was accepted at each position."""
        with self._lock:
            return self._total.drafts, tuple(self._total.accepted)

    def last_minute(self, address: str | None = None) -> list[console_pb2.Drafted]:
        """By release, of one server or of all of them; releases without drafts are absent."""
        since = (self._clock() - MINUTE) // SLOT_SECONDS
        found: dict[int, Counted] = {}
        with self._lock:
            for server in self._slots if address is None else (address,):
                for slot in self._slots.get(server, ()):
                    if slot.number < since:
                        continue
                    for version, counted in slot.releases.items():
                        found.setdefault(version, Counted()).add(counted.drafts, counted.accepted)
        return [_message(version, found[version]) for version in sorted(found)]

    def cells(self) -> list[console_pb2.AcceptanceCell]:
        """By release, then by policy version."""
        with self._lock:
            return [
                console_pb2.AcceptanceCell(
                    draft_version=version,
                    first_policy_version=cell.first_policy,
                    last_policy_version=cell.last_policy,
                    drafts=cell.drafts,
                    accepted_per_position=cell.accepted,
                    first_time=cell.first_time,
                    last_time=cell.last_time,
                )
                for version, cells in sorted(self._cells.items())
                for cell in cells
            ]

    def servers(self) -> list[console_pb2.ServerPast]:
        """The newest ``MAX_SLOTS`` slots of each server that drafted in that time."""
        with self._lock:
            self._forget_old()
            return [
                console_pb2.ServerPast(
                    address=address,
                    slots=[
                        console_pb2.AcceptanceSlot(
                            time=slot.number * SLOT_SECONDS,
                            drafts=slot.drafts,
                            accepted_per_position=slot.accepted,
                        )
                        for slot in slots
                    ],
                )
                for address, slots in sorted(self._slots.items())
            ]

    def _cell(self, version: int, policy: int | None, now: float) -> _Cell:
        cells = self._cells.setdefault(version, [])
        last = cells[-1] if cells else None
        if last is None or not _covers(last, policy):
            if sum(map(len, self._cells.values())) >= MAX_CELLS:
                self._thin()
                cells = self._cells.setdefault(version, [])
            last = _Cell(first_policy=policy, last_policy=policy, first_time=now)
            cells.append(last)
        last.last_time = now
        return last

    def _thin(self) -> None:
        """Half as many cells; where every release has one left, the oldest half of them go."""
        if all(len(cells) < 2 for cells in self._cells.values()):
            for version in sorted(self._cells)[: MAX_CELLS // 2]:
                del self._cells[version]
        for cells in self._cells.values():
            for at in range(len(cells) // 2):
                one, two = cells[at], cells.pop(at + 1)
                one.add(two.drafts, two.accepted)
                if one.first_policy is None:
                    one.first_policy = two.first_policy
                one.last_policy, one.last_time = two.last_policy, two.last_time

    def _slot(self, address: str, number: int) -> _Slot:
        slots = self._slots.get(address)
        if slots is None:
            self._forget_old()
            while len(self._slots) >= MAX_SERVERS:
                self._slots.pop(next(iter(self._slots)))
            slots = self._slots[address] = deque(maxlen=MAX_SLOTS)
        if not slots or slots[-1].number != number:
            slots.append(_Slot(number=number))
        return slots[-1]

    def _forget_old(self) -> None:
        """Servers that left the fleet, or have not drafted for long."""
        since = self._clock() // SLOT_SECONDS - MAX_SLOTS
        for address in [a for a, slots in self._slots.items() if slots[-1].number < since]:
            del self._slots[address]


def _covers(cell: _Cell, policy: int | None) -> bool:
    if policy is None or cell.first_policy is None or cell.last_policy is None:
        return policy is cell.first_policy
    return cell.first_policy <= policy <= cell.last_policy


def _message(version: int, counted: Counted) -> console_pb2.Drafted:
    return console_pb2.Drafted(
        draft_version=version,
        drafts=counted.drafts,
        accepted_per_position=counted.accepted,
        acceptance_length=1 + sum(counted.accepted) / counted.drafts if counted.drafts else None,
    )


T = TypeVar("T")

SECONDS = 5.0
RECENT = 120
WHOLE = 400


class Thinned(Generic[T]):
    """Evenly spread over everything that was ever added, at most ``most`` of it, and the newest.

    For cumulative counters: what is left out changes no difference between what is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[T] = []
        self._newest: list[T] = []
        self._stride = 1
        self._added = 0

    def add(self, value: T) -> None:
        """One more."""
        self._newest = [value]
        if self._added % self._stride == 0:
            self._kept.append(value)
            self._newest = []
        self._added += 1
        if len(self._kept) >= self._most:
            self._kept = self._kept[::2]
            self._stride *= 2

    def __iter__(self) -> Iterator[T]:
        return iter([*self._kept, *self._newest])


class Moments:
    """Owns the thread that reads. Thread-safe.

    Args:
        read: the counters now.
        seconds: between two readings.
    """

    def __init__(self, read: Callable[[], console_pb2.Moment], seconds: float = SECONDS) -> None:
        self._read = read
        self.seconds = seconds
        self._lock = threading.Lock()
        self._recent: deque[console_pb2.Moment] = deque(maxlen=RECENT)
        self._whole: Thinned[console_pb2.Moment] = Thinned(WHOLE)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moments", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End; True when the thread ended within ``timeout`` seconds."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def take(self) -> None:
        """One reading."""
        moment = self._read()
        with self._lock:
            self._recent.append(moment)
            self._whole.add(moment)

    def both(self) -> tuple[list[console_pb2.Moment], list[console_pb2.Moment]]:
        """The newest ``RECENT`` readings, and the whole life in at most ``WHOLE`` and one."""
        with self._lock:
            return list(self._recent), list(self._whole)

    def _run(self) -> None:
        self.take()
        while not self._over.wait(self.seconds):
            self.take()


KEPT = 4096


class PolicyClock:
    """Remembers the newest ``KEPT`` announcements. Thread-safe.

    Args:
        known: newest version that a restarted trainer knows already; it counts from now on.
        now: Unix seconds.
    """

    def __init__(self, known: int | None = None, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seen: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._newest_at: float | None = None
        if known is not None:
            self._seen.append((known, now()))

    @property
    def newest_at(self) -> float | None:
        """Unix time of the newest announcement; None before the first to this process."""
        with self._lock:
            return self._newest_at

    def announced(self, version: int) -> bool:
        """A version was announced; whether it is a new one."""
        with self._lock:
            if self._seen and self._seen[-1][0] == version:
                return False
            if self._seen and version < self._seen[-1][0]:
                # Another run: its versions say nothing about those of the one before.
                self._seen.clear()
            self._newest_at = self._now()
            self._seen.append((version, self._newest_at))
            return True

    def behind_seconds(self, version: int) -> float:
        """Seconds since the first version after ``version`` was announced; 0 if none was."""
        with self._lock:
            later = (at for seen, at in self._seen if seen > version)
            return max(0.0, self._now() - next(later, self._now()))


@dataclass
class _Server:
    """``error`` is that of the last look, ``state`` the last answer."""

    error: str = ""
    state: rollout_pb.ServerState = field(default_factory=rollout_pb.ServerState)
    seen_at: float = 0.0


class FleetView:
    """Told of every look at the fleet; remembers the last. Thread-safe.

    Args:
        events: learns of servers that come, go, or change their mind about requests.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}

    def looked(self, states: Mapping[str, rollout_pb.ServerState | Failure]) -> None:
        """All servers of the fleet were asked; what each answered."""
        now = time.time()
        with self._lock:
            for address in set(self._servers) - set(states):
                del self._servers[address]
                self._events.note(console_pb2.EVENT_KIND_SERVER_LEFT, server=address)
            for address, state in states.items():
                if address not in self._servers:
                    self._servers[address] = _Server()
                    self._events.note(console_pb2.EVENT_KIND_SERVER_JOINED, server=address)
                self._saw(address, state, now)

    def messages(self) -> list[console_pb2.ServerView]:
        """Every server, by address; without its acceptance."""
        with self._lock:
            return [
                console_pb2.ServerView(
                    address=address,
                    reachable=bool(server.seen_at) and not server.error,
                    error=server.error,
                    state=server.state if server.seen_at else None,
                    seen_at=server.seen_at,
                )
                for address, server in sorted(self._servers.items())
            ]

    def _saw(self, address: str, state: rollout_pb.ServerState | Failure, now: float) -> None:
        server = self._servers[address]
        if isinstance(state, Failure):
            error = state.text.removeprefix(f"{address}: ")
            if not server.error:
                self._note(console_pb2.EVENT_KIND_SERVER_UNREACHABLE, address, server, error)
            server.error = error
            return
        first, before = not server.seen_at, server.state
        if server.error:
            self._note(console_pb2.EVENT_KIND_SERVER_BACK, address, server)
        server.error, server.state, server.seen_at = "", state, now
        if state.not_ready and (first or not before.not_ready):
            self._note(console_pb2.EVENT_KIND_SERVER_NOT_READY, address, server, state.not_ready)
        elif before.not_ready and not state.not_ready:
            self._note(console_pb2.EVENT_KIND_SERVER_READY, address, server)
        if not first and before.speculation_enabled != state.speculation_enabled:
            on = state.speculation_enabled
            kind = (
                console_pb2.EVENT_KIND_SPECULATION_ON
                if on
                else console_pb2.EVENT_KIND_SPECULATION_OFF
            )
            self._note(kind, address, server)

    def _note(
        self, kind: console_pb2.EventKind, address: str, server: _Server, reason: str = ""
    ) -> None:
        known = bool(server.seen_at)
        version = server.state.draft_version if known else None
        self._events.note(kind, draft_version=version, server=address, reason=reason)


VERDICTS_SHOWN = 100


@dataclass(frozen=True)
class Live:
    """Who knows about the fleet and its releases, beside their counters.

    Args:
        events: what happened.
        fleet: the servers as they were seen last.
        acceptance: what their drafts did.
        registry: manifests.
        verdicts: the gate's.
        trial: the one under way.
    """

    events: Events
    fleet: FleetView
    acceptance: AcceptanceHistory
    registry: Registry
    verdicts: GateResults
    trial: Callable[[], Trial | None]


class Status:
    """Puts the status together from those who know. Thread-safe.

    Args:
        counters: of this process.
        runs: the current run.
        promotions: the promoted release.
        newest_release: the newest release at start; ``released`` moves it on.
        trained_against: newest policy version that it was trained on, if any.
        store: the run's samples.
        rings: shared memory of the sessions.
        live: the fleet and its releases.
    """

    def __init__(
        self,
        counters: Counters,
        runs: Runs,
        promotions: Promotions,
        newest_release: int,
        trained_against: int | None,
        store: SampleStore,
        rings: Rings,
        live: Live,
    ) -> None:
        self._counters = counters
        self._runs = runs
        self._promotions = promotions
        self._newest = (newest_release, trained_against)
        self._store = store
        self._rings = rings
        self._live = live
        self._started_at = time.time()
        self._code_version = code_version()
        self._feeder: tuple[str, str] | None = None
        self._against: dict[int, int | None] = {}
        self.moments = Moments(self.moment)
        run = runs.current
        self.policy_clock = PolicyClock(None if run is None else run.latest_policy_version)

    @property
    def events(self) -> Events:
        """What happened."""
        return self._live.events

    @property
    def last_verdict(self) -> release_pb2.Verdict | None:
        """The gate's newest verdict, also from before a restart."""
        return next(iter(self._live.verdicts.newest(1)), None)

    @property
    def newest_release(self) -> int:
        """The newest release."""
        return self._newest[0]

    @property
    def trained_against(self) -> int | None:
        """Newest policy version that the newest release was trained on; None if none."""
        return self._newest[1]

    @property
    def releases(self) -> dict[str, tuple[int, int | None]]:
        """The newest, the promoted and the last good release, each with the newest policy version
        that it was trained on; None for none, or where its manifest cannot be read."""
        now = self._promotions.now
        versions = {"newest": self._newest[0], "promoted": now.promoted, "served": now.last_good}
        known = dict([self._newest])
        for version in set(versions.values()) - {self._newest[0]}:
            known[version] = self._trained_against(version)
        self._against = known
        return {which: (version, known[version]) for which, version in versions.items()}

    @property
    def served_at(self) -> float | None:
        """See ``Promotion.served_at``."""
        return self._promotions.now.served_at

    @property
    def runs(self) -> Runs:
        """The current run, its sessions and streams."""
        return self._runs

    @property
    def store(self) -> SampleStore:
        """The run's samples."""
        return self._store

    def released(self, version: int, trained_against: int | None) -> None:
        """A release was written."""
        self._newest = (version, trained_against)

    def run_opened(self, session: Session) -> None:
        """A client feeds a run. One that connects again and again is told of once."""
        who = (session.run.run_id, session.client)
        if who != self._feeder:
            self._feeder = who
            self.events.note(
                console_pb2.EVENT_KIND_RUN_OPENED,
                policy_version=session.run.latest_policy_version,
                reason=f"run {who[0]} by {who[1] or 'a client without a name'}",
            )

    def policy_announced(self, run: Run) -> None:
        """A version became known; samples that are too old for it are gone."""
        latest = run.latest_policy_version
        if latest is not None and self.policy_clock.announced(latest):
            self._counters.policy_announcements.inc()
            self.events.note(console_pb2.EVENT_KIND_POLICY_ANNOUNCED, policy_version=latest)

    def read(self) -> pb.TrainerStatus:
        """The status now."""
        counters = self._counters
        samples, evicted = by_label(counters.samples), by_label(counters.samples_evicted)
        verdict = self.last_verdict
        promotion = self._promotions.now
        status = pb.TrainerStatus(
            samples_accepted=samples.get("accepted", 0),
            samples_duplicate=samples.get("duplicate", 0),
            samples_refused=samples.get("refused", 0),
            samples_evicted=sum(evicted.values()) - evicted.get("unsaved", 0),
            replay_capacity_bytes=self._store.capacity_bytes,
            train_steps=int(total(counters.train_steps)),
            train_steps_skipped=int(total(counters.train_steps_skipped)),
            tokens_trained=int(total(counters.tokens_trained)),
            train_seconds=total(counters.train_seconds),
            newest_release=self.newest_release,
            promoted_release=promotion.promoted,
            pinned=promotion.pinned,
            loss=counters.loss,
            step_acceptance=counters.step_acceptance,
            last_gate="" if verdict is None else verdict.reason,
            idle=counters.idle,
            started_at=self._started_at,
            code_version=self._code_version,
            trained_against_policy_version=self.trained_against,
            last_minute=self._live.acceptance.last_minute(),
            trial=_trial(self._live.trial()),
            last_verdict=verdict,
            refused_by_field=by_label(counters.samples_refused),
            evicted_by_reason=evicted,
            publishes=counters.fleet_events(),
            verdicts=by_label(counters.verdicts),
            training_error=counters.training_error,
        )
        run = self._runs.current
        if run is not None:
            status.run_id = run.run_id
            latest = run.latest_policy_version
            if latest is not None:
                status.policy_version = latest
                status.staleness = max(0, latest - (self.releases["promoted"][1] or 0))
        self._complete(status)
        for server in self._live.fleet.messages():
            for drafted in self._live.acceptance.last_minute(server.address):
                if drafted.draft_version == server.state.draft_version:
                    server.last_minute.CopyFrom(drafted)
            status.servers.append(server)
        return status

    def _complete(self, status: pb.TrainerStatus) -> None:
        releases = self.releases
        served, against = releases["served"]
        status.time = time.time()
        status.served_release = served
        _set(status, "served_at", self._promotions.now.served_at)
        _set(status, "promoted_trained_against", releases["promoted"][1])
        _set(status, "served_trained_against", against)
        _set(status, "policy_registered_at", self.policy_clock.newest_at)
        if status.HasField("policy_version"):
            status.served_staleness = max(0, status.policy_version - (against or 0))
            status.served_staleness_seconds = self.policy_clock.behind_seconds(against or 0)
        held = self._store.counts()
        status.samples_pending = held.pending
        status.samples_held_out = held.held_out
        status.samples_unsaved = held.unsaved
        status.replay_bytes = held.nbytes
        status.replay_directory = str(self._store.folder)
        rings = self._rings.counts
        # A stream claims its ring after it began and releases it before it ends.
        status.streams["grpc"] = max(0, self._runs.streams - rings["claimed"])
        status.streams["shared_memory"] = rings["claimed"]
        status.sessions = self._runs.sessions
        status.rings.update(rings)
        status.ring_capacity_bytes = self._rings.nbytes
        if self._counters.servers is not None:
            status.servers_by_state.update(asdict(self._counters.servers))

    def moment(self) -> console_pb2.Moment:
        """The counters that plots are made of, now."""
        status = self.read()
        drafts, accepted = self._live.acceptance.total
        known = status.HasField
        return console_pb2.Moment(
            time=time.time(),
            samples_accepted=status.samples_accepted,
            train_steps=status.train_steps,
            tokens_trained=status.tokens_trained,
            loss_total=self._counters.loss_total,
            replay_bytes=status.replay_bytes,
            samples_pending=status.samples_pending,
            policy_version=status.policy_version if known("policy_version") else None,
            promoted_release=status.promoted_release,
            staleness=status.staleness if known("staleness") else None,
            drafts=drafts,
            accepted_per_position=accepted,
        )

    def history(self) -> console_pb2.History:
        """What is remembered of the past."""
        recent, whole = self.moments.both()
        return console_pb2.History(
            recent=recent,
            whole=whole,
            acceptance=self._live.acceptance.cells(),
            servers=self._live.acceptance.servers(),
            verdicts=self._live.verdicts.newest(VERDICTS_SHOWN),
            moment_s=self.moments.seconds,
            slot_s=SLOT_SECONDS,
        )

    def _trained_against(self, version: int) -> int | None:
        if version in self._against:
            return self._against[version]
        try:
            manifest = self._live.registry.get(version)
        except RefusedError:
            return None
        known = manifest.HasField("trained_against_policy_version")
        return manifest.trained_against_policy_version if known else None


def _set(status: pb.TrainerStatus, field: str, value: float | None) -> None:
    if value is not None:
        setattr(status, field, value)


def _trial(trial: Trial | None) -> console_pb2.TrialView | None:
    if trial is None:
        return None
    return console_pb2.TrialView(
        draft_version=trial.version,
        incumbent_version=trial.incumbent,
        servers=trial.servers,
        others=trial.others,
    )
