"""The faults inflicted on the services so that every alert has its reason, over four trainers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.alerts.rig import Rig
from benchmarks.alerts.sightings import NotSeenError

A, B = 0, 1
WELL_SECONDS = 12.0


@dataclass(frozen=True)
class Row:
    """An alert and its cause.

    Attributes:
        alert: its name, with the variant where two rules share it.
        cause: what was done.
        seconds: from then until it fired; None where it did not.
    """

    alert: str
    cause: str
    seconds: float | None


@dataclass
class Story:
    """See the module.

    Args:
        rig: entered.
        patience: seconds that an alert is waited for.
    """

    rig: Rig
    patience: float
    while_well: frozenset[str] = frozenset()
    """The alerts that fired before anything was done."""

    def run(self) -> Iterator[Row]:
        """Do everything; a row as soon as its alert fired or did not."""
        yield from self._trial_and_staleness()
        yield from self._broken_draft_and_training()
        yield from self._no_way_to_the_servers()
        yield from self._too_much_to_train()

    def _trial_and_staleness(self) -> Iterator[Row]:
        rig = self.rig
        # Measured before all is well: a server that never generates plainly has no break-even.
        rig.servers[A].speculate(False)
        rig.trainer((A, B), trial={"min_drafts": 200, "max_seconds": 10.0})
        rig.connect((A, B))
        first = time.monotonic()
        rig.policy.sync(1)
        rig.policy.feed(True)
        rig.servers[A].speculate(True)
        rig.watch()
        time.sleep(WELL_SECONDS)
        self.while_well = frozenset(rig.sightings.all)
        off = time.monotonic()
        rig.servers[B].speculate(False)
        moved = time.monotonic()
        rig.policy.sync(31)
        yield self._seen("SlipstreamDraftStale versions", "policy version 31, draft of none", moved)
        yield self._seen("SlipstreamSpeculationOff", "SetSpeculation(false) on one server", off)
        rig.servers[B].speculate(True)
        ruined = time.monotonic()
        rig.promote_ruined()
        yield self._seen("SlipstreamRolledBack", "a ruined draft loses its trial", ruined)
        # A policy that stands still does not make its draft older.
        rig.policy.sync(32)
        yield self._seen(
            "SlipstreamDraftStale seconds", "no newer draft since the first sync", first
        )
        rig.servers[A].speculate(False)
        rig.servers[B].speculate(False)
        untested = time.monotonic()
        rig.command("releases", "promote", "1")
        yield self._seen("SlipstreamTrialUndecided", "a release without any drafting", untested)
        rig.command("releases", "rollback")
        rig.servers[A].speculate(True)
        rig.servers[B].speculate(True)
        killed = time.monotonic()
        rig.kill_trainer()
        yield self._seen("SlipstreamTrainerDown", "kill -9 of the trainer", killed)
        yield self._seen("SlipstreamSamplesShed bridge", "the same, with the feed on", killed)

    def _broken_draft_and_training(self) -> Iterator[Row]:
        rig = self.rig
        # The bridge that is there feeds this trainer at once, before the next one does.
        began = time.monotonic()
        rig.trainer(
            (A,),
            trial={"enabled": False},
            publish={"reconcile_s": 0.0},
            training={"learning_rate": 1e30, "warmup_steps": 0},
        )
        rig.connect((A,))
        moved = time.monotonic()
        rig.policy.sync(61)
        yield self._seen("SlipstreamFleetSplit policy", "version 61 goes to one server", moved)
        yield self._seen("SlipstreamStepsSkipped", "a learning rate of 1e30", began)
        rig.policy.feed(False)
        stopped = time.monotonic()
        rig.promote_ruined()
        promoted = time.monotonic()
        ruined = "a ruined draft goes live on one server, without a trial"
        yield self._seen("SlipstreamAcceptanceOne", ruined, promoted)
        yield self._seen("SlipstreamServerNotReady", "the same", promoted)
        yield self._seen("SlipstreamFleetSplit draft", "the same", promoted)
        yield self._seen("SlipstreamBelowBreakEven", "the same", promoted)
        yield self._seen("SlipstreamNoSamples", "the feed stops, rollouts go on", stopped)

    def _no_way_to_the_servers(self) -> Iterator[Row]:
        rig = self.rig
        began = time.monotonic()
        # A server on the ruined draft is to be healed; nothing can be staged in a millisecond.
        rig.trainer(
            (A, B),
            replay={"held_out_fraction": 0.999},
            publish={"reconcile_s": 0.5, "stage_timeout_s": 0.001},
        )
        rig.connect((A,))
        rig.policy.sync(91)
        rig.policy.feed(True)
        fed = time.monotonic()
        yield self._seen("SlipstreamPublishFailing", "a deadline that staging cannot keep", began)
        yield self._seen("SlipstreamNotTraining", "every sample is held out", fed)
        yield self._seen("SlipstreamNotReleasing", "the same", fed)
        rig.policy.use([rig.urls[A]])
        killed = time.monotonic()
        rig.kill_server(B)
        yield self._seen("SlipstreamServerDown prometheus", "kill -9 of a rollout server", killed)
        yield self._seen("SlipstreamServerDown trainer", "the same", killed)

    def _too_much_to_train(self) -> Iterator[Row]:
        rig = self.rig
        rig.trainer(
            (A,),
            server={"shared_memory": "", "max_tokens_per_sample": 40},
            replay={"capacity_bytes": 1 << 17},
            # A batch is waited for, and meanwhile what came first has to go.
            training={"batch_tokens": 4096, "linger_s": 5.0},
        )
        rig.connect((A,))
        fed = time.monotonic()
        # Of each version comes what fills half of the buffer.
        for version in range(121, 131):
            rig.policy.sync(version)
        yield self._seen("SlipstreamSamplesShed trainer", "a replay buffer of 128 KiB", fed)
        wrong = time.monotonic()
        rig.policy.said_temperature = 0.5
        yield self._seen("SlipstreamTeacherWrong", "log-probs of another temperature", wrong)

    def _seen(self, alert: str, cause: str, since: float) -> Row:
        try:
            row = Row(alert, cause, self.rig.sightings.wait(alert, since, self.patience))
        except NotSeenError as error:
            print(error, file=sys.stderr, flush=True)
            row = Row(alert, cause, None)
        return row
