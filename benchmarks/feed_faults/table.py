"""Inflicts faults one after the other on one run, and counts what must not happen."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.feed_faults.faults import Fault
from benchmarks.feed_faults.rig import Rig, StalledError


@dataclass
class Row:
    """A fault over one transport. The rest of the run's figures are in ``Table``.

    Attributes:
        runs: how often it was inflicted.
        acknowledged: samples that were acknowledged from then until the next fault.
        lost, twice: see ``Audit``; each sample in the row after whose fault it was found.
        stalled: runs after which something did not come, and steps of the policy that took too
            long, by the bridge's doing.
        leaked: files of shared memory that stayed.
        seconds: the longest run.
        own_seconds: the longest time that the bridge's calls took in a step; that of a weight
            sync.
    """

    runs: int = 0
    acknowledged: int = 0
    lost: int = 0
    twice: int = 0
    stalled: int = 0
    leaked: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0
    sync_seconds: float = 0.0


@dataclass
class Table:
    """All of it.

    Attributes:
        rows: by fault and transport.
        wrong: what else was not as it should be, in words.
        samples: accepted in the whole run.
        recognised: of answers, how many said that the sample was there before.
        refused: samples, by field.
        steps: of the policy.
        seen, expected: anchors that the weights were trained on, and should have been.
        left: what is left in shared memory at the end.
    """

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    samples: int = 0
    recognised: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    seen: int = 0
    expected: int = 0
    left: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        """Sum of a column."""
        return sum(getattr(row, name) for row in self.rows.values())


def run(
    rig: Rig,
    plan: Sequence[tuple[Fault, str]],
    rng: Random,
    longest_call: float,
    say: Callable[[str], None] = lambda line: None,
) -> Table:
    """Inflict a plan.

    Args:
        rig: not started.
        plan: see ``schedule``.
        rng: of the instants.
        longest_call: seconds that the bridge's calls may take in one step of the policy.
        say: told each fault before it is inflicted.
    """
    table = Table()
    rig.start_trainer()
    rig.wait_ready()
    rig.start_policy(plan[0][1])
    rig.wait_acknowledged()
    known: set[str] = set()
    for number, (fault, transport) in enumerate(plan, 1):
        say(f"{number} of {len(plan)}: {fault.name}, {transport}")
        row = table.rows.setdefault((fault.name, transport), Row())
        try:
            rig.use(transport)
            _inflict(rig, fault, row, rng, longest_call, known)
        except StalledError as error:
            row.stalled += 1
            table.wrong.append(f"{fault.name}, {transport}: {error}")
            break
        except AssertionError as error:
            table.wrong.append(f"{fault.name}, {transport}: {error}")
            break
    if not table.wrong:
        _finish(rig, table, known)
    records = rig.records
    table.recognised, table.refused = records.recognised, dict(records.refused)
    table.steps = len(records.steps)
    for text in table.wrong:
        print(text, file=sys.stderr, flush=True)
    return table


def _inflict(
    rig: Rig, fault: Fault, row: Row, rng: Random, longest_call: float, known: set[str]
) -> None:
    began = time.monotonic()
    rig.records.refresh()
    before, steps = len(rig.records.acknowledged), len(rig.records.steps)
    row.runs += 1
    fault.inflict(rig, rng)
    rig.wait_acknowledged()
    row.leaked += rig.leaked()
    audit = rig.audit()
    row.lost += len(set(audit.lost) - known)
    row.twice += len(set(audit.twice) - known)
    known.update(audit.lost, audit.twice)
    row.acknowledged += len(rig.records.acknowledged) - before
    made = rig.records.steps[steps:]
    row.own_seconds = max([row.own_seconds, *(own for _, own, _ in made)])
    row.sync_seconds = max([row.sync_seconds, *(synced for *_, synced in made)])
    row.stalled += sum(own > longest_call for _, own, _ in made)
    row.seconds = max(row.seconds, time.monotonic() - began)


def _finish(rig: Rig, table: Table, known: set[str]) -> None:
    row = table.rows.setdefault(("all of it trained, then stopped", "both"), Row())
    began = time.monotonic()
    row.runs += 1
    try:
        audit, (table.seen, table.expected), table.left = rig.finish()
    except AssertionError as error:
        row.stalled += isinstance(error, StalledError)
        table.wrong.append(f"at the end: {error}")
        return
    row.lost += len(set(audit.lost) - known)
    row.twice += len(set(audit.twice) - known)
    row.acknowledged = len(rig.records.acknowledged)
    row.leaked += len(table.left)
    row.seconds = time.monotonic() - began
    table.samples = audit.held
    if table.seen != table.expected:
        table.wrong.append(f"the weights saw {table.seen} anchors, not {table.expected}")
