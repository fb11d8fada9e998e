"""``python -m benchmarks.trials``: bad drafts are forced live while trials are disturbed."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import end_on_sigterm, options
from benchmarks.publish_faults.drills import Row, drill
from benchmarks.publish_faults.rig import RELEASES, Rig
from benchmarks.publish_faults.server_process import TRAFFIC
from benchmarks.publish_faults.vllm_rig import VllmRig
from draft_trainer.config import TrialConfig
from draft_trainer.drafters import Draft
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.registry import Registry
from slipstream.v1 import release_pb2

SOUND, RUINED, NOISE, FOREIGN = (0, 1, 2), RELEASES, RELEASES + 1, RELEASES + 2
"""Releases: near the initial draft; random; 60 % noise; one of another policy."""
BAD = {RUINED: "ruined", NOISE: "60 % noise", FOREIGN: "foreign"}
ACCEPTED = {
    "": [0.8, 0.65, 0.5],
    str(RUINED): [0.02, 0, 0],
    str(NOISE): [0.6, 0.4, 0.25],
    str(FOREIGN): [0.05, 0, 0],
}
"""Without vLLM: share of verification steps in which each position is accepted."""
STEPS_PER_SECOND = 4000
LIMIT_SECONDS = 60.0
DELAYS = (0.1, 0.3, 1.0, 2.0, 4.0, 10.0)
"""Seconds into a trial at which the trainer is killed."""


def ruin(head: Draft, version: int) -> None:
    """Make a sound draft one of ``BAD``, in place."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if version == RUINED:
                parameter.copy_(0.05 * noise)
            elif version == NOISE and parameter.dim() > 1:
                parameter.add_(0.6 * parameter.std() * noise)
            elif version == FOREIGN and parameter.dim() > 1:
                # As sound a draft, of states whose dimensions mean other things.
                order = torch.randperm(parameter.shape[1], generator=generator)
                parameter.copy_(parameter[:, order])


def add_bad_releases(root: Path) -> None:
    """After the sound ones of a rig's registry."""
    registry = Registry(root)
    for version in BAD:
        head = Eagle3().read(registry.path(0)).draft()
        ruin(head, version)
        registry.create(head, release_pb2.ReleaseManifest(parent_version=0))


class Memory:
    """Servers with the product's control plane and counters over an engine in memory."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder, 2)
        self._traffic = folder / TRAFFIC

    def use(self, on: bool) -> None:
        """Requests arrive, or none do."""
        rate = STEPS_PER_SECOND if on else 0
        partial = self._traffic.with_suffix(".partial")
        partial.write_text(json.dumps({"steps_per_second": rate, "accepted": ACCEPTED}))
        partial.replace(self._traffic)

    def failed(self) -> int:
        """Requests that failed since the last time."""
        return 0


class Vllm:
    """Two real vLLM servers with requests in flight; without drafting there is no traffic."""

    def __init__(self, folder: Path) -> None:
        self.rig: VllmRig = VllmRig(folder)

    def use(self, on: bool) -> None:
        """Verification steps happen, or none do."""
        for server in self.rig.vllm:
            server.speculate(on)

    def failed(self) -> int:
        """Requests that failed, or greedy outputs that changed, since the last time."""
        assert self.rig.load is not None
        return sum(len(seen.failed) + seen.different for seen in self.rig.load.take())


Disturb = Callable[[Memory | Vllm, int], None]
"""Forces releases live; told the world and how often the row was taken."""


def killed(version: int) -> Disturb:
    """A bad release is promoted, and the trainer is killed some time into its trial."""

    def disturb(world: Memory | Vllm, turn: int) -> None:
        world.rig.ask("promote", version)
        time.sleep(DELAYS[turn % len(DELAYS)])
        world.rig.kill_trainer()
        world.rig.start_trainer()

    return disturb


def superseded(world: Memory | Vllm, turn: int) -> None:
    """Bad releases replace one another before a verdict, the trainer dies after the last."""
    for version in (NOISE, SOUND[1 + turn % 2], FOREIGN, NOISE)[turn % 2 :]:
        world.rig.ask("promote", version)
    if turn % 2:
        world.rig.kill_trainer()
        world.rig.start_trainer()


def idle(world: Memory | Vllm, turn: int) -> None:
    """No traffic until the trial is undecided; the trainer dies meanwhile, then traffic comes."""
    version = tuple(BAD)[turn % len(BAD)]
    world.use(False)
    world.rig.ask("promote", version)
    if turn % 2:
        world.rig.kill_trainer()
        world.rig.start_trainer()
    deadline = time.monotonic() + LIMIT_SECONDS
    while not world.rig.ask("pointer")["undecided"]:
        assert time.monotonic() < deadline, "an idle fleet's release is not called undecided"
        time.sleep(0.1)
    assert world.rig.ask("pointer")["live"] == version
    world.use(True)


def by_hand(world: Memory | Vllm, turn: int) -> None:
    """Rolled back by hand during a trial, and forced again."""
    world.rig.ask("promote", RUINED)
    world.rig.ask("roll-back")
    assert world.rig.ask("pointer")["live"] not in BAD, "rolled back to a release that failed"
    world.rig.ask("promote", tuple(BAD)[turn % len(BAD)])


def sound(world: Memory | Vllm, turn: int) -> None:
    """A sound release, with the trainer killed in its trial."""
    live = world.rig.ask("pointer")["live"]
    killed(SOUND[(SOUND.index(live) + 1) % len(SOUND)] if live in SOUND else 0)(world, turn)


def run(world: Memory | Vllm, disturb: Disturb, turn: int) -> str:
    """Disturb, then wait until the fleet serves a release that passed, or an alert says more."""
    rig = world.rig
    world.failed()
    disturb(world, turn)
    began = time.monotonic()
    while True:
        now = rig.ask("pointer")
        passed = now["trial"] is None and now["live"] in now["good"]
        seconds = time.monotonic() - began
        if passed or (now["undecided"] and seconds > LIMIT_SECONDS / 2):
            break
        assert seconds < LIMIT_SECONDS, f"after a minute of traffic: {now}"
        time.sleep(0.1)
    assert not passed or now["live"] not in BAD, f"{BAD[now['live']]} passed"
    assert not set(now["good"]) & set(BAD), f"a bad release is called good: {now}"
    assert rig.settled() == now["live"] or not passed
    failed = world.failed()
    assert not failed, f"{failed} requests failed"
    return "passed" if passed else "undecided, alerted"


DRILLS: dict[str, Disturb] = {
    **{f"{name}, trainer killed": killed(version) for version, name in BAD.items()},
    "replaced before a verdict": superseded,
    "idle fleet": idle,
    "rolled back by hand": by_hand,
    "sound, trainer killed": sound,
}
"""The rows of the table."""


def begin(world: Memory | Vllm) -> None:
    """Start everything, and wait until the incumbent's live acceptance is on disk."""
    add_bad_releases(world.rig.root)
    world.rig.trial = TrialConfig(max_seconds=10.0)
    world.rig.start()
    world.use(True)
    deadline = time.monotonic() + 2 * LIMIT_SECONDS
    while not world.rig.ask("pointer")["figures"]:
        assert time.monotonic() < deadline, "the incumbent was not measured"
        time.sleep(0.2)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; 0 only if every drill ended well."""
    parser = options(
        "trials",
        "Forces ruined, subtly ruined and foreign drafts live while the trainer is killed 0.1 to "
        "10 s into their trials, releases replace one another and fleets are idle. Within a minute "
        "of traffic the fleet serves a release that passed, or an alert says that it is undecided.",
    )
    parser.add_argument("--vllm", action="store_true", help="two real vLLM servers under load")
    parser.add_argument("--runs", type=int, default=48, help="in all; the rows take turns")
    chosen = parser.parse_args(argv)
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        world: Memory | Vllm = (Vllm if chosen.vllm else Memory)(Path(folder))
        try:
            begin(world)
            servers = "2, real vLLM" if chosen.vllm else "2, over an engine in memory"
            rows = {name: Row(partial(run, world, disturb)) for name, disturb in DRILLS.items()}
            return drill(chosen, servers, rows)
        finally:
            world.rig.stop()


if __name__ == "__main__":
    sys.exit(main())
