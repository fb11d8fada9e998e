"""``TrainerStatus``: built in one function, and kept as snapshots for the history.

The page, ``draft-trainer status`` and ``/metrics`` show this message, and compute nothing of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from draft_trainer.config import TrainerConfig
from draft_trainer.counters import Counters, by_label, total
from draft_trainer.ingest.ingest import Ingest
from draft_trainer.ingest.run import Run, Runs, Session
from draft_trainer.ingest.store import SampleStore
from draft_trainer.releases.confidence import Batch
from draft_trainer.releases.pointer import Pointer, PointerStore
from draft_trainer.releases.registry import Registry
from draft_trainer.releases.rollout_client import Failure, drafts_wanted
from draft_trainer.releases.watch import AcceptanceWatch, Seen
from draft_trainer.server.diagnosis import OK, PROBLEM, WAITING, ProblemLog, diagnose
from draft_trainer.state import Events, State
from draft_trainer.training.economy import Economy
from slipstream.errors import RefusedError
from slipstream.metrics import code_version
from slipstream.readiness import not_ready_text
from slipstream.v1 import console_pb2 as console
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2
from slipstream.v1 import rollout_server_pb2 as rollout

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 60.0
SNAPSHOT_SECONDS = 10.0
LATELY_SNAPSHOTS = 90
"""Snapshots of a quarter of an hour, in which shares of samples and steps are judged: totals over
weeks would hide what goes wrong now, and keep what is over."""
VERSIONS_KEPT = 4096
NOT_IN_HISTORY = ("servers", "last_verdict", "replay_directory", "code_version", "diagnosis")
"""Fields that a snapshot leaves out: they are large, or they hardly change."""

# Errors of one snapshot; the next one may succeed, so none of them ends the history.
_UNEXPECTED = (OSError, ValueError, TypeError, LookupError, RuntimeError, MemoryError)


def last_minute(recent: Iterable[tuple[str, Seen]]) -> dict[str, list[console.Drafted]]:
    """Sum up drafts by server, then by release; "" is all servers. Without drafts: absent."""
    found: dict[tuple[str, int], list[Batch]] = {}
    for address, seen in recent:
        found.setdefault((address, seen.version), []).append(seen.batch)
        found.setdefault(("", seen.version), []).append(seen.batch)
    drafted: dict[str, list[console.Drafted]] = {}
    for address, version in sorted(found):
        drafted.setdefault(address, []).append(_drafted(version, found[address, version]))
    return drafted


def _drafted(version: int, batches: Iterable[Batch]) -> console.Drafted:
    total = sum(batches, Batch((), ()))
    pairs = zip(total.accepted, total.tried, strict=True)
    return console.Drafted(
        draft_version=version,
        drafts=total.drafts,
        tried_per_position=total.tried,
        accepted_per_position=total.accepted,
        acceptance_length=1 + sum(total.accepted) / total.drafts,
        acceptance_per_position=[accepted / tried for accepted, tried in pairs if tried],
    )


class PolicyClock:
    """Knows when a run's newest ``VERSIONS_KEPT`` policy versions were registered. Thread-safe."""

    def __init__(self, key: str = "", known: int | None = None) -> None:
        self._lock = threading.Lock()
        self._key = key
        self._seen: deque[tuple[int, float]] = deque(maxlen=VERSIONS_KEPT)
        self.newest_at: float | None = None
        """Unix time of the newest registration; None before the first to this process."""
        if known is not None:
            self._seen.append((known, time.time()))

    def began(self, key: str) -> None:
        """Note the ``Run.key`` that is fed. Versions of another are not comparable with its own."""
        with self._lock:
            if key != self._key:
                self._key, self.newest_at = key, None
                self._seen.clear()

    def registered(self, version: int) -> bool:
        """Note a version that was registered; return whether it is a new one."""
        with self._lock:
            if self._seen and version <= self._seen[-1][0]:
                return False
            self.newest_at = time.time()
            self._seen.append((version, self.newest_at))
            return True

    def behind_seconds(self, version: int) -> float:
        """Return the seconds since a version after this one was first registered; 0 if none was."""
        now = time.time()
        with self._lock:
            later = (at for seen, at in self._seen if seen > version)
            return max(0.0, now - next(later, now))


class FleetView:
    """Remembers how every server answered last, and notes each change as an event. Thread-safe."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._servers: dict[str, console.ServerView] = {}

    def looked(self, states: Mapping[str, rollout.ServerState | Failure]) -> None:
        """Take the answers of all servers of the fleet."""
        with self._lock:
            for address in set(self._servers) - set(states):
                del self._servers[address]
                self._events.note("server_left", server=address)
            for address, state in states.items():
                if address not in self._servers:
                    self._servers[address] = console.ServerView(address=address)
                    self._events.note("server_joined", server=address)
                self._saw(self._servers[address], state)

    def servers(self) -> list[console.ServerView]:
        """Return every server, by address, without its acceptance."""
        with self._lock:
            return [deepcopy(self._servers[address]) for address in sorted(self._servers)]

    def _saw(self, server: console.ServerView, state: rollout.ServerState | Failure) -> None:
        if isinstance(state, Failure):
            error = state.text.removeprefix(f"{server.address}: ")
            if not server.error:
                self._note("server_unreachable", server, error)
            server.error, server.reachable = error, False
            return
        if server.error:
            self._note("server_back", server)
        first = not server.HasField("state")
        was_ready, drafted = not server.state.not_ready, drafts_wanted(server.state)
        server.error, server.reachable = "", True
        server.state.CopyFrom(state)
        server.not_ready = not_ready_text(state.not_ready)
        if was_ready and state.not_ready:
            self._note("server_not_ready", server, server.not_ready)
        elif not was_ready and not state.not_ready:
            self._note("server_ready", server)
        if not first and drafted != drafts_wanted(state):
            self._note("speculation_off" if drafted else "speculation_on", server)

    def _note(self, kind: str, server: console.ServerView, reason: str = "") -> None:
        version = server.state.draft_version if server.HasField("state") else None
        self._events.note(kind, draft_version=version, server=server.address, reason=reason)


@dataclass
class Status:
    """Knows everything that the status is made of. Thread-safe."""

    counters: Counters
    runs: Runs
    store: SampleStore
    ingest: Ingest
    registry: Registry
    pointer: PointerStore
    state: State
    fleet: FleetView
    watch: AcceptanceWatch
    economy: Economy
    config: TrainerConfig
    started_at: float = field(default_factory=time.time)
    _client: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        run = self.runs.current
        self.problems = ProblemLog()
        # The start, and the newest snapshots.
        self._recent = deque([pb.TrainerStatus()], maxlen=1 + LATELY_SNAPSHOTS)
        self._minute = deque[pb.TrainerStatus](maxlen=round(WINDOW_SECONDS / SNAPSHOT_SECONDS))
        self.policy_clock = (
            PolicyClock() if run is None else PolicyClock(run.key, run.latest_policy_version)
        )

    @property
    def events(self) -> Events:
        """The events so far."""
        return self.state.events

    def run_opened(self, session: Session) -> None:
        """Note that a client feeds a run. One that connects again and again is noted once."""
        self.policy_clock.began(session.run.key)
        client = (session.run.run_id, session.client)
        if client != self._client:
            self._client = client
            self.events.note(
                "run_opened",
                policy_version=session.run.latest_policy_version,
                reason=f"run {client[0]} by {client[1] or 'a client without a name'}",
            )

    def run_resumed(self, session: Session) -> None:
        """Note that a job resumed from an older checkpoint and began a new history of its run."""
        self.events.note(
            "run_resumed",
            policy_version=session.run.latest_policy_version,
            reason=f"run {session.run.run_id} resumes from an older checkpoint; this version and "
            "later ones of the process before are dropped",
        )

    def policy_announced(self, run: Run) -> None:
        """Note that a policy version was registered."""
        latest = run.latest_policy_version
        if latest is None or run is not self.runs.current:
            return
        self.policy_clock.began(run.key)
        if self.policy_clock.registered(latest):
            self.counters.policy_announcements.inc()
            self.events.note("policy_announced", policy_version=latest)

    def keep_snapshot(self) -> None:
        """Add the status to the history, and log what keeps drafts from being released."""
        try:
            status = self.read()
            self.problems.note(list(status.diagnosis))
            for name in NOT_IN_HISTORY:
                status.ClearField(name)  # type: ignore[arg-type]
            # While no sample arrives, as in a long step of the loop, the window stays as it is.
            if len(self._recent) <= LATELY_SNAPSHOTS or _sent(status) > _sent(self._recent[1]):
                self._recent.append(status)
            self._minute.append(status)
            self.state.history.add(status)
        except RefusedError as error:
            # A full disk must not end the trainer.
            logger.error("a snapshot of the status was not kept: %s", error)
        except _UNEXPECTED:
            logger.exception("a snapshot of the status was not kept")

    def history(self) -> pb.History:
        """Return the snapshots and the gate results that are kept."""
        return pb.History(snapshots=self.state.history.snapshots(), verdicts=self.verdicts())

    def verdicts(self) -> list[release_pb2.Verdict]:
        """Return the gate's verdicts that are kept, oldest first."""
        return self.state.gate_results.newest(0)

    def read(self) -> pb.TrainerStatus:
        """Return the status now."""
        counters, held = self.counters, self.store.counts()
        samples, evicted = by_label(counters.samples), by_label(counters.samples_evicted)
        pointer, newest = self.pointer.now, counters.newest_release
        gate = next(iter(self.state.gate_results.newest(1)), None)
        run = self.runs.current
        policy, run_id = (None, "") if run is None else (run.latest_policy_version, run.run_id)
        first = None if run is None else run.first_policy_version
        served_against = self._trained_against(pointer.live, run_id)
        counted = first if served_against is None else served_against
        recent = list(self.watch.recent(WINDOW_SECONDS))
        drafted = last_minute(recent)
        status = pb.TrainerStatus(
            time=time.time(),
            started_at=self.started_at,
            code_version=code_version(),
            trainer=self.state.owner,
            history=0 if run is None else run.history,
            held_out_by_completion=self.store.held_out_by_completion,
            # Samples.
            run_id=run_id,
            samples_accepted=samples.get("accepted", 0),
            samples_refused=samples.get("refused", 0),
            refused_by_field=by_label(counters.samples_refused),
            samples_evicted=sum(evicted.values()) - evicted.get("unsaved", 0),
            evicted_by_reason=evicted,
            samples_pending=held.pending,
            samples_held_out=held.held_out,
            samples_unsaved=held.unsaved,
            replay_bytes=held.nbytes,
            replay_capacity_bytes=self.store.capacity_bytes,
            replay_directory=str(self.store.folder),
            streams=self.ingest.streams,
            sessions=self.runs.sessions,
            # Training.
            train_steps=int(total(counters.train_steps)),
            train_steps_skipped=int(total(counters.train_steps_skipped)),
            tokens_trained=int(total(counters.tokens_trained)),
            tokens_outside=total(counters.tokens_outside),
            train_seconds=total(counters.train_seconds),
            loss=counters.loss,
            step_acceptance=counters.step_acceptance,
            idle=counters.idle,
            training_error=counters.training_error,
            training_waits_for=counters.training_waits_for,
            # Versions.
            policy_version=policy,
            policy_registered_at=self.policy_clock.newest_at,
            newest_release=newest,
            trained_against_policy_version=self._trained_against(newest, run_id),
            promoted_release=pointer.promoted,
            promoted_trained_against=self._trained_against(pointer.promoted, run_id),
            pinned=pointer.pinned,
            served_release=pointer.live,
            served_trained_against=served_against,
            served_at=pointer.live_at,
            served_staleness=_behind(policy, counted),
            served_staleness_seconds=None
            if policy is None
            else self.policy_clock.behind_seconds(counted or 0),
            # Gate and fleet.
            verdicts=by_label(counters.verdicts),
            last_verdict=gate,
            trial=_trial_view(pointer) if pointer.on_trial else None,
            servers=self._servers(drafted),
            servers_by_state=counters.servers,
            last_minute=drafted.get("", ()),
        )
        if recent:
            status.drafted.CopyFrom(_drafted(0, (seen.batch for _, seen in recent)))
        if (speed_up := _speed_up(status.servers)) is not None:
            status.speed_up, status.speed_up_note = speed_up, "where drafts run, over none"
        elif recent:
            note = "not known yet; a fixed draft length needs --time-plain-steps"
            status.speed_up_note = note
        else:
            status.speed_up_note = "no drafts in the last minute"
        _add_rates(status, self._minute)
        decision = self.economy.last
        if decision is not None:
            status.MergeFrom(
                pb.TrainerStatus(
                    training_decision=decision.reason,
                    training_paused=not decision.train,
                    **vars(decision.figures),
                )
            )
        status.diagnosis.extend(diagnose(status, self.config, self._recent[0]))
        return status

    def _servers(
        self, drafted: Mapping[str, Iterable[console.Drafted]]
    ) -> list[console.ServerView]:
        servers = self.fleet.servers()
        for server in servers:
            for one in drafted.get(server.address, ()):
                if one.draft_version == server.state.draft_version:
                    server.last_minute.CopyFrom(one)
            server.standing, server.severity = standing(server)
        return servers

    def _trained_against(self, version: int, run_id: str) -> int | None:
        """Return the newest policy version of the run that a release was trained on: None for none,
        or if its manifest cannot be read."""
        try:
            return self.registry.trained_against(version, run_id)
        except RefusedError:
            return None


def _sent(status: pb.TrainerStatus) -> int:
    return status.samples_accepted + status.samples_refused


def standing(server: console.ServerView) -> tuple[str, console.Diagnosis.Severity]:
    """Return a server's state in words, and whether somebody has to put it right."""
    if not server.reachable:
        return "unreachable", PROBLEM
    if server.state.not_ready:
        return "not ready", PROBLEM
    if server.state.speculation_enabled:
        return "ready", OK
    if server.state.speculation_wanted:
        return "ready, no draft pays", OK
    return "ready, drafting off", WAITING


def _speed_up(servers: Iterable[console.ServerView]) -> float | None:
    """Return the mean over the servers that drafted in the last minute and know it."""
    known = [
        (server.last_minute.drafts, server.state.speed_up)
        for server in servers
        if server.state.HasField("speed_up")
    ]
    drafts = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / drafts if drafts else None


def _add_rates(status: pb.TrainerStatus, minute: Sequence[pb.TrainerStatus]) -> None:
    """Add the rates since the oldest of the last minute's snapshots to a status."""
    seconds = status.time - minute[0].time if minute else 0.0
    if seconds > 0:
        accepted = status.samples_accepted - minute[0].samples_accepted
        tokens = status.tokens_trained - minute[0].tokens_trained
        status.samples_per_second = accepted / seconds
        status.tokens_per_second = tokens / seconds


def _behind(policy: int | None, trained_against: int | None) -> int | None:
    """Return the policy versions since the one trained against."""
    return None if policy is None else max(0, policy - (trained_against or 0))


def _trial_view(now: Pointer) -> console.TrialView:
    return console.TrialView(
        draft_version=now.live,
        incumbent_version=now.incumbent,
        began_at=now.left_good_at,
        undecided=now.undecided,
    )
