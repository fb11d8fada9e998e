"""The rows of the table: what goes wrong, and what must be said about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.publish_faults.rig import RELEASES, Rig, TrainerDiedError
from draft_trainer.releases.registry import Registry

DEADLY = ("die-staging", "die-before", "die-after", "worker")
"""Faults after which the server's process ends by itself."""


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Args:
        name: of the row.
        inflict: makes it happen while ``version`` is published; ``turn`` counts its runs.
        published: whether ``version`` is live after it, None where either will do.
    """

    name: str
    inflict: Callable[[Rig, int, int], None]
    published: bool | None


RECONNECT_SECONDS = 120.0


def run(rig: Rig, fault: Fault, turn: int) -> None:
    """Publish the next release while it goes wrong, then look at everything.

    Args:
        rig: the processes; whichever is not running is started.
        fault: what goes wrong.
        turn: number of earlier runs of this fault.

    Raises:
        AssertionError: the fleet is not on one release, or the next publish does not succeed.
    """
    rig.start()
    before = rig.settled()
    rig.watch(turn % len(rig.addresses))
    version = following_on(before)
    fault.inflict(rig, version, turn)
    rig.start()
    after = rig.settled()
    assert after in (before, version), f"{fault.name}: on draft {after}"
    if fault.published is not None:
        expected = version if fault.published else before
        assert after == expected, f"{fault.name}: on draft {after}, not {expected}"
    following = following_on(version)
    answer = rig.ask("promote", following)
    deadline = time.monotonic() + RECONNECT_SECONDS
    # The trainer's connection to a server that has just come back may still be waiting to be tried.
    while "unreachable" in " ".join(answer.get("errors", ())) and time.monotonic() < deadline:
        answer = rig.ask("promote", following)
    assert answer.get("version") == following and not answer["errors"], f"{fault.name}: {answer}"
    assert rig.settled() == following
    rig.check()


def following_on(version: int) -> int:
    """Return the next release, in a circle: by its turn, servers have forgotten its content."""
    return version % (RELEASES - 1) + 1


def _server(word: str) -> Callable[[Rig, int, int], None]:
    def inflict(rig: Rig, version: int, turn: int) -> None:
        index = turn % len(rig.addresses)
        rig.arm(index, word)
        answer = rig.ask("promote", version)
        assert answer["errors"], answer
        if word in DEADLY:
            rig.wait_ended(index)

    return inflict


def _server_before(rig: Rig, version: int, turn: int) -> None:
    rig.kill_server(turn % len(rig.addresses))
    answer = rig.ask("promote", version)
    assert answer["version"] == version and "unreachable" in answer["errors"][0]


def _server_after(rig: Rig, version: int, turn: int) -> None:
    assert rig.ask("promote", version)["version"] == version
    rig.kill_server(turn % len(rig.addresses))


def _trainer(arm: str) -> Callable[[Rig, int, int], None]:
    def inflict(rig: Rig, version: int, turn: int) -> None:
        rig.ask("arm", arm)
        try:
            answer = rig.ask("promote", version)
        except TrainerDiedError:
            return
        raise AssertionError(f"the trainer should have died: {answer}")

    return inflict


def _refused(arm: str, text: str) -> Callable[[Rig, int, int], None]:
    def inflict(rig: Rig, version: int, turn: int) -> None:
        rig.ask("arm", arm)
        answer = rig.ask("promote", version)
        said = " ".join(answer.get("errors", [answer.get("refused", "")]))
        assert text in said, answer
        if arm == "flip":
            return
        # So that the bad payload is not kept: a new trainer reads it anew.
        rig.kill_trainer()

    return inflict


def _at_rest(rig: Rig, version: int, turn: int) -> None:
    weights = Registry(rig.root).path(version) / "model.safetensors"
    whole = weights.read_bytes()
    mode = weights.stat().st_mode
    weights.chmod(0o644)
    damaged = bytearray(whole)
    damaged[-10] ^= 1
    # A new trainer, because the one before may have the release in memory, whole.
    rig.kill_trainer()
    try:
        weights.write_bytes(bytes(damaged))
        rig.start_trainer()
        answer = rig.ask("promote", version)
        assert "refused" in answer or answer["errors"], answer
    finally:
        weights.write_bytes(whole)
        weights.chmod(mode)


def _two_at_once(rig: Rig, version: int, turn: int) -> None:
    other = following_on(version)
    answer = rig.ask("promote-both", version, other)
    assert "version" in answer["first"] and "version" in answer["second"], answer
    rig.ask("promote", version)


def _two_trainers(rig: Rig, version: int, turn: int) -> None:
    assert "no other process writes" in rig.second_trainer().get("refused", "")
    assert rig.ask("promote", version)["version"] == version


def _clock(rig: Rig, version: int, turn: int) -> None:
    rig.ask("arm", ("clock-forward", "clock-back")[turn % 2])
    assert rig.ask("promote", version)["version"] == version


def _everything(rig: Rig, version: int, turn: int) -> None:
    assert rig.ask("promote", version)["version"] == version
    rig.kill_trainer()
    for index in range(len(rig.addresses)):
        rig.kill_server(index)


def _damage(rig: Rig, version: int, turn: int) -> None:
    assert rig.ask("promote", version)["version"] == version
    rig.arm(turn % len(rig.addresses), "damage")


def _cut(rig: Rig, version: int, turn: int) -> None:
    rig.arm(turn % len(rig.addresses), "cut")
    rig.ask("promote", version)


FAULTS = (
    Fault("server killed before the stage", _server_before, True),
    Fault("server killed during the stage", _server("die-staging"), True),
    Fault("server killed before its commit", _server("die-before"), False),
    Fault("server killed after its commit", _server("die-after"), False),
    Fault("server killed after the publish", _server_after, True),
    Fault("server refuses the commit", _server("refuse"), False),
    Fault("engine worker dies in the commit", _server("worker"), False),
    Fault("draft damaged in a server's memory", _damage, True),
    Fault("trainer killed before the stage", _trainer("die-before-stage"), False),
    Fault("trainer killed during the stage", _trainer("die-during-stage"), False),
    Fault("trainer killed before the commits", _trainer("die-before-commit"), False),
    Fault("trainer killed between two commits", _trainer("die-between-commits"), False),
    Fault("trainer killed after the commits", _trainer("die-after-commits"), False),
    Fault("connection cut at any time", _cut, None),
    Fault("trainer's disk full", _refused("full", "File too large"), False),
    Fault("server's disk full", _server("disk-full"), False),
    Fault("byte flipped in transit", _refused("flip", "sha256"), False),
    Fault("byte flipped at rest", _at_rest, False),
    Fault("release with a NaN", _refused("nan", "NaN"), False),
    Fault("release of a wrong shape", _refused("shape", "shape"), False),
    Fault("release of another policy", _refused("other-policy", "d2t"), False),
    Fault("two publishes at once", _two_at_once, True),
    Fault("two trainers at once", _two_trainers, True),
    Fault("clock jumps by a day", _clock, True),
    Fault("everything restarted", _everything, True),
)
