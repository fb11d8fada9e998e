"""Reconciles the fleet: ends trials, and puts diverged servers back on their release.

Where the policy is not synced through Slipstream (``publish.on = "promotion"``) it publishes what
is promoted, too.

A server may have restarted with the draft on its command line, slept at level 2 and lost its draft,
been away during a publish, or been written to by another client. What it reports of itself
(version, checksum, what its workers read back) is compared with what is wanted. A server that does
not come right is tried again with exponential backoff and reports itself not ready meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from draft_trainer.releases.commits import put_on, stage_version_on
from draft_trainer.releases.fleet import STAGES_AT_ONCE
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.rollout_client import Failure, RolloutClient
from draft_trainer.releases.watch import AcceptanceWatch
from slipstream.errors import RefusedError
from slipstream.readiness import not_ready_text
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)

PACE_SECONDS, MOST_PACE_SECONDS = 0.05, 1.0
"""Least time between two looks at a trial, however many servers report; more where looks take long,
up to the second."""

MOST_RECOMMITS = 2
"""Commits again of one release, on a server that serves nothing acceptable with it."""

LOST = frozenset({pb.NOT_READY_REASON_NOT_IN_MEMORY, pb.NOT_READY_REASON_ASLEEP})
"""Reasons of a server whose workers do not hold the draft."""

LOOK_SECONDS = 2.0
"""Between two looks at who belongs to the fleet where nothing is reconciled; after an error."""

READ_BACK_SECONDS = 10.0
"""Between two looks into the workers' memory: they cost an engine step a little time."""

MEASURE_SECONDS = 5.0
"""Between two writes of what the live acceptance of a good release is."""

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0


@dataclass
class Divergence:
    """A server's fault, and when it may be tried again.

    Attributes:
        reason: of the metrics.
        text: for people.
        against: why it is not ready; empty where it serves another release.
    """

    reason: str = ""
    text: str = ""
    against: frozenset[pb.NotReadyReason] = frozenset()
    attempts: int = 0
    not_before: float = 0.0

    def tried(self) -> float:
        """Seconds until the next try, longer after every one."""
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self.attempts, 16))
        self.attempts += 1
        self.not_before = time.monotonic() + wait
        return wait


class Reconciler:
    """Owns one thread and the watch's."""

    def __init__(self, publisher: Publisher, watch: AcceptanceWatch) -> None:
        self._publisher = publisher
        self._watch = watch
        self._seconds = publisher.fleet.config.reconcile_s
        self._diverged: dict[str, Divergence] = {}
        self._stages = 0
        self._recommits: Counter[tuple[str, int]] = Counter()
        self._read_back_at = 0.0
        self._stopping = threading.Event()
        self._give_up: tuple[int, str] | None = None
        self._unpublished, self._unpublished_version = Divergence(), -1
        # What the last process could not finish is published at the start.
        self._released = threading.Event()
        self._released.set()
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End after the step under way; True when the thread ended within ``timeout`` seconds.

        The watch's threads end with their streams, for which the fleet is closed after this.
        """
        self._stopping.set()
        self._watch.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def released(self) -> None:
        """A release was written and may have been promoted. Returns at once."""
        self._released.set()
        self._watch.wake()

    def round(self) -> None:
        """Look at every server once and put right what diverged.

        Does nothing while a publish is under way; that one sees to the fleet itself.
        """
        self._give_up = None
        with self._publisher.try_pause() as waiting:
            if waiting is not None:
                self._reconcile(waiting)
        if self._give_up is not None:
            version, reason = self._give_up
            try:
                self._publisher.roll_back(reason, version)
            except RefusedError as error:
                # Where no release is good it stays; the next one has to be published all the same.
                logger.warning("draft %d stays: %s", version, error)

    def _reconcile(self, waiting: frozenset[str]) -> None:
        publisher, fleet = self._publisher, self._publisher.fleet
        fleet.refresh()
        read_back = time.monotonic() >= self._read_back_at
        if read_back:
            self._read_back_at = time.monotonic() + READ_BACK_SECONDS
        states = fleet.states(read_back)
        if not read_back:
            # Low acceptance: read the weights back to tell a bad draft from a lost one.
            poor = [
                address
                for address, state in states.items()
                if not isinstance(state, Failure) and _blames_draft(_reasons(state))
            ]
            states |= fleet.each(lambda client: client.state(True), poor)
        fleet.abort_strays(states, waiting)
        # A server that cannot be reached keeps its backoff: nothing is known of it.
        for address in list(self._diverged):
            if address not in states:
                del self._diverged[address]
        given_up, live = set(), publisher.pointer.now.live
        blaming, serving = dict[str, str](), 0
        for address, state in states.items():
            if isinstance(state, Failure):
                continue
            found, version = self._compare(address, state), state.draft_version
            serving += version == live
            if found is None or not _blames_draft(found.against):
                continue
            if self._recommits[address, version] >= MOST_RECOMMITS:
                given_up.add(address)
                if version == live:
                    blaming[address] = found.text
        # A server that most others contradict is broken itself: it stays not ready.
        if 2 * len(blaming) > serving:
            self._give_up = (live, "; ".join(f"{a}, again: {t}" for a, t in blaming.items()))
        self._tell_those_behind(states)
        now = time.monotonic()
        reached = [a for a in self._diverged if not isinstance(states[a], Failure)]
        late = [address for address in reached if self._diverged[address].not_before <= now]
        # One that sleeps is put right when it wakes up: no try before that counts.
        asleep = pb.NOT_READY_REASON_ASLEEP
        left = given_up | {a for a in late if asleep in self._diverged[a].against}
        due = [address for address in late if address not in left][:STAGES_AT_ONCE]
        # A sync may have committed since they were looked at.
        stale = [address for address in due if self._diverged[address].reason != "not_ready"]
        for address, state in fleet.each(lambda client: client.state(), stale).items():
            if not isinstance(state, Failure):
                states[address] = state
                self._compare(address, state)
        due = [address for address in due if address in self._diverged]
        for address, answer in fleet.each(self._put_right, due).items():
            self._tried(address, answer)
            if not isinstance(answer, Failure):
                states[address] = answer
        self._count(states)

    def _tell_those_behind(self, states: Mapping[str, pb.ServerState | Failure]) -> None:
        """Servers on another release than the fleet are not ready until they have it: those that
        missed the publish, and were not reached when it ended."""
        publisher = self._publisher
        version = publisher.pointer.now.live
        sha256 = publisher.payloads.digest(version)
        behind = [
            address
            for address, found in self._diverged.items()
            if found.reason != "not_ready" and not isinstance(states[address], Failure)
        ]
        if behind and sha256 is not None:
            live = pb.FleetDraft(version=version, sha256=sha256)
            publisher.fleet.each(lambda client: client.abort([], live), behind)

    def _count(self, states: Mapping[str, pb.ServerState | Failure]) -> None:
        """Count servers that are known, reachable, ready, and on the fleet's release."""
        publisher = self._publisher
        live, reached = publisher.pointer.now.live, 0
        ready = current = 0
        for state in states.values():
            if not isinstance(state, Failure):
                reached, ready = reached + 1, ready + (not state.not_ready)
                current += publisher.payloads.is_served(state, live)
        publisher.counters.servers = {
            **{"known": len(states), "reachable": reached},
            **{"ready": ready, "current": current},
        }

    def _compare(self, address: str, state: pb.ServerState) -> Divergence | None:
        """Note, and return, how a server differs from what is wanted on it; None: it does not."""
        wanted = self._publisher.pointer.now.live
        reasons = frozenset[pb.NotReadyReason]()
        if not self._publisher.payloads.is_served(state, wanted):
            same = state.draft_version == wanted
            reason = "other_content" if same else "other_version"
            text = f"serves {'another ' if same else ''}draft {state.draft_version}, not {wanted}"
        elif state.not_ready:
            reason, text, reasons = "not_ready", not_ready_text(state.not_ready), _reasons(state)
        else:
            self._diverged.pop(address, None)
            return None
        found = self._diverged.setdefault(address, Divergence())
        found.reason, found.text, found.against = reason, text, reasons
        return found

    def _put_right(self, client: RolloutClient) -> pb.ServerState | Failure:
        publisher = self._publisher
        payloads, fleet, counters = publisher.payloads, publisher.fleet, publisher.counters
        wanted = publisher.pointer.now.live
        # An id of its own, which is aborted where it fails: a sync may hold the usual one.
        self._stages += 1
        stage_id = f"draft-{wanted}-healed-{self._stages}"
        staged = stage_version_on(client, wanted, payloads, stage_id, fleet, counters)
        if isinstance(staged, Failure):
            return staged
        with publisher.committing():
            now = publisher.pointer.now.live
            if now == wanted:
                answer = client.commit([stage_id])
            else:
                client.abort([stage_id])
                answer = put_on(client, now, payloads, fleet, counters)
        if isinstance(answer, Failure):
            client.abort([stage_id])
        return answer

    def _tried(self, address: str, answer: pb.ServerState | Failure) -> None:
        found, publisher = self._diverged[address], self._publisher
        wait = found.tried()
        if _blames_draft(found.against) and not isinstance(answer, Failure):
            self._recommits[address, answer.draft_version] += 1
        publisher.counters.healed(found.reason, not isinstance(answer, Failure))
        if isinstance(answer, Failure):
            logger.warning("%s %s; next try in %.0f s: %s", address, found.text, wait, answer.text)
            return
        wanted, text = publisher.pointer.now.live, f"{address} {found.text}"
        publisher.pointer.state.events.note("healed", draft_version=wanted, reason=text)
        logger.warning("%s was put on draft %d again: it %s", address, wanted, found.text)

    def _run(self) -> None:
        revision, due, measure_at = 0, time.monotonic(), 0.0
        while not self._stopping.is_set():
            looked = time.monotonic()
            try:
                if time.monotonic() >= due:
                    self._watch.follow(self._publisher.fleet.refresh())
                    if self._seconds:
                        self.round()
                    else:
                        self._count(self._publisher.fleet.states())
                    if time.monotonic() >= measure_at:
                        measure_at = time.monotonic() + MEASURE_SECONDS
                        self._publisher.measure()
                    due = time.monotonic() + (self._seconds or LOOK_SECONDS)
                    if time.monotonic() >= self._unpublished.not_before:
                        self._released.set()
                if self._released.is_set():
                    self._released.clear()
                    self._publish()
                looked = time.monotonic()
                if self._publisher.settle():
                    self.released()
            except (OSError, RuntimeError, MemoryError, RefusedError) as error:
                # No file descriptor, thread or memory can be had, or a disk fails: it may have
                # passed by the next round.
                logger.warning("%s", error, exc_info=not isinstance(error, RefusedError))
                self._stopping.wait(LOOK_SECONDS)
            # A look at all reports of a large fleet takes long: most of the time is for training.
            pace = min(MOST_PACE_SECONDS, 4 * (time.monotonic() - looked))
            revision = self._watch.wait_beyond(revision, max(0.0, due - time.monotonic()))
            self._stopping.wait(max(PACE_SECONDS, pace))

    def _publish(self) -> None:
        """Publish what is promoted, where no sync does."""
        now, on = self._publisher.pointer.now, self._publisher.fleet.config.on
        if now.promoted == now.live or on != "promotion":
            self._unpublished = Divergence()
            return
        if self._unpublished_version != now.promoted:
            self._unpublished, self._unpublished_version = Divergence(), now.promoted
        self._unpublished.tried()
        for address, outcome in self._publisher.publish_promoted().outcomes.items():
            if outcome.error:
                logger.warning("%s: %s", address, outcome.error)


def _reasons(state: pb.ServerState) -> frozenset[pb.NotReadyReason]:
    return frozenset(found.reason for found in state.not_ready)


def _blames_draft(reasons: Set[pb.NotReadyReason]) -> bool:
    """Tell whether a server accepts next to nothing of a draft that its workers do hold."""
    return pb.NOT_READY_REASON_NOTHING_ACCEPTED in reasons and not reasons & LOST
