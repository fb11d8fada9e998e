"""``python -m benchmarks.robustness``: fuzzing and overload against both services."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Target, finish, options, table
from benchmarks.robustness import traffic
from benchmarks.robustness.caller import ROLLOUT, TRAINER
from benchmarks.robustness.examples_of_calls import Calls
from benchmarks.robustness.fuzzing import Fuzzed, fuzz
from benchmarks.robustness.healthy import Feeder, Stager
from benchmarks.robustness.overload import SILENT_ROLLOUT, SILENT_TRAINER, Crowd, flood
from benchmarks.robustness.services import Process, start_rollout_server, start_trainer

DEADLINE = 60.0
FUZZ_BYTES = 64 << 20
"""Growth from the middle to the end of the fuzzing: what is kept for good grows on, what the
allocator keeps back does not."""
CROWD_BYTES = 192 << 20
"""Growth under any crowd of clients: 1,000 connections, and the threads and messages of the calls
that the limits let in."""

_OPEN_RUN = "/slipstream.v1.DraftTrainer/OpenRun"
_COMMIT = "/slipstream.v1.RolloutServer/Commit"


@dataclass
class Row:
    """What one crowd did.

    Attributes:
        name: of it.
        growth: bytes of memory while it was there.
        served: how often a sound client was.
        slowest: seconds of that.
        codes: how the crowd's calls ended.
    """

    name: str
    growth: int
    served: int
    slowest: float
    codes: dict[str, int]


class Sound:
    """Has sound clients served on a thread, from construction to ``stop``."""

    def __init__(self, serve: Callable[[], object]) -> None:
        self._serve = serve
        self._over = threading.Event()
        self.served = 0
        self.slowest = 0.0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Raises what it met."""
        self._over.set()
        self._thread.join(2 * DEADLINE)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while not self._over.wait(0.05):
            began = time.monotonic()
            try:
                self._serve()
            except BaseException as error:  # noqa: BLE001 (told by ``stop``)
                self.error = error
                return
            self.served += 1
            self.slowest = max(self.slowest, time.monotonic() - began)


def crowds(process: Process, serve: Callable[[], object], trainer: str) -> list[Row]:
    """Every crowd in turn. ``trainer``: an open session of it, empty for a rollout server."""
    rows: list[Row] = []

    @contextmanager
    def row(name: str, codes: dict[str, int]) -> Iterator[Crowd]:
        memory, sound = process.rss, Sound(serve)
        try:
            with Crowd(process.address) as crowd:
                yield crowd
                time.sleep(2.0)
                growth = process.rss - memory
                codes.update(crowd.ended)
        finally:
            sound.stop()
        assert process.alive, f"{name}: it ended"
        rows.append(Row(name, growth, sound.served, sound.slowest, codes))

    silent = SILENT_TRAINER if trainer else SILENT_ROLLOUT
    with row("1,000 calls that send nothing", {}) as crowd:
        crowd.silent_calls(silent, 1000)
        _until(lambda: crowd.ended.total() >= 1000)
    with row("1,000 connections that say nothing", {}) as crowd:
        crowd.bare_connections(1000)
    codes: dict[str, int] = {}
    if trainer:
        with row("1,000 idle sessions, each on its channel", codes) as crowd:
            codes.update(crowd.idle_sessions(1000))
        with row("a stream that reads no answers", {}) as crowd:
            crowd.deaf_stream(trainer, 1_000_000)
            time.sleep(10.0)
    else:
        with row("32 stages of a byte a second", {}) as crowd:
            crowd.slow_stages(32)
            time.sleep(10.0)
    codes = {}
    with row("10,000 calls that are refused", codes):
        if trainer:
            request = traffic.open_run()
            request.policy.hidden_size = 1
            codes.update(flood(process.address, _OPEN_RUN, request.SerializeToString(), 10_000))
        else:
            codes.update(flood(process.address, _COMMIT, b"", 10_000))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    chosen = _parse(argv)
    fuzzed: dict[str, Fuzzed] = {}
    rows: dict[str, list[Row]] = {}
    logs: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, start in (("trainer", start_trainer), ("rollout server", start_rollout_server)):
            home = Path(folder) / name.replace(" ", "-")
            home.mkdir()
            process = start(home)
            try:
                fuzzed[name], rows[name] = _one(process, name, chosen)
            finally:
                process.stop()
                logs[name] = process.log
    lines = [
        [f"{name}: {row.name}", row.served, f"{row.slowest:.2f}", f"{row.growth / 2**20:.1f}"]
        for name, found in rows.items()
        for row in found
    ]
    print(table("", ["", "served", "slowest s", "growth MiB"], lines))
    figures = {
        "seed": chosen.seed,
        "fuzzed": {
            name: {
                "inputs": each.tally.inputs,
                "codes": dict(each.tally.codes),
                "untyped": each.tally.untyped[:20],
                "served": each.served,
                "memory": each.memory,
                "seconds": each.seconds,
            }
            for name, each in fuzzed.items()
        },
        "crowds": {name: [vars(row) for row in found] for name, found in rows.items()},
    }
    return finish(chosen.json, figures, _targets(fuzzed, rows, logs, chosen))


def _one(process: Process, name: str, chosen: argparse.Namespace) -> tuple[Fuzzed, list[Row]]:
    trainer = name == "trainer"
    client = Feeder(process.address, DEADLINE) if trainer else Stager(process.address, DEADLINE)
    session = client.session_id if isinstance(client, Feeder) else ""
    try:
        fuzzed = fuzz(
            process,
            TRAINER if trainer else ROLLOUT,
            Calls(session),
            client.serve,
            inputs=chosen.inputs // 2,
            seconds=chosen.seconds / 2,
            seed=chosen.seed,
        )
        print(f"{name}: {fuzzed.tally.inputs} inputs in {fuzzed.seconds:.0f} s", flush=True)
        return fuzzed, crowds(process, client.serve, session)
    finally:
        client.close()


def _targets(
    fuzzed: dict[str, Fuzzed],
    rows: dict[str, list[Row]],
    logs: dict[str, str],
    chosen: argparse.Namespace,
) -> list[Target]:
    inputs = sum(each.tally.inputs for each in fuzzed.values())
    untyped = sum(len(each.tally.untyped) for each in fuzzed.values())
    traces = sum(log.count("Traceback") for log in logs.values())
    growth = max(each.memory[1] - each.memory[0] for each in fuzzed.values())
    crowd = max(each.growth for found in rows.values() for each in found)
    unserved = sum(each.served == 0 for found in rows.values() for each in found)
    slowest = max(each.slowest for found in rows.values() for each in found)
    return [
        Target.at_least("inputs", inputs, chosen.inputs),
        Target.at_most("answers without a type", untyped, 0),
        Target.at_most("exceptions in the logs", traces, 0),
        Target.at_most("MiB that fuzzing takes, second half", growth / 2**20, FUZZ_BYTES >> 20),
        Target.at_most("MiB that a crowd takes", crowd / 2**20, CROWD_BYTES >> 20),
        Target.at_most("crowds without a sound client served", unserved, 0),
        Target.at_most("slowest answer to a sound client, s", slowest, DEADLINE),
    ]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "robustness",
        "Damaged messages to every method of both services, and crowds of clients that hold "
        "places, flood or never read; each service in a real process (the rollout server over an "
        "engine in memory), with a sound client that must be served meanwhile.",
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="messages, both together")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of fuzzing, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the damage")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
