"""Decides whether the draft is trained now: seconds of generation that it saves against its own.

One decision a policy version. With G seconds of generation a version, at a fixed draft length, a
draft of acceptance length L + g instead of L saves G * g / (L + g) of them: generation is as many
steps as tokens divided by acceptance length. The gain g that more training is expected to bring is
the greater of what the served draft has lost on the newest held-out states since it was released,
and of what training has gained a version lately. Training for one version more pays while the
saving over the coming versions exceeds what that training takes from the loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from draft_trainer.config import EconomyConfig
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1.release_pb2 import GateFigures

SMOOTHING = 0.5
"""Weight of the newest version in means over versions."""

START, STOP = 1.2, 0.8
"""Saving over cost at which training begins again, and ends: noise alone does not switch it."""


@dataclass(frozen=True)
class Decision:
    """For one policy version.

    Attributes:
        policy_version: that it is for.
        train: whether to train.
        reason: in words, with the figures.
        saving_seconds: of generation, expected over the horizon; None while unknown.
        cost_seconds: of the loop, that one version's training takes; None while unknown.
    """

    policy_version: int
    train: bool
    reason: str
    saving_seconds: float | None = None
    cost_seconds: float | None = None


class Economy:
    """Keeps the measurements and the last decision. ``served`` is thread-safe; the rest belongs to
    the training thread."""

    def __init__(self, config: EconomyConfig) -> None:
        self.config = config
        self.last: Decision | None = None
        self._lock = threading.Lock()
        self._busy: dict[str, float] = {}
        self._generated: dict[str, float] = {}
        self._trained = 0.0
        self._gained = 0.0
        self._generation: float | None = None
        self._cost: float | None = None
        self._progress: float | None = None
        self._released_length: float | None = None
        self._length: float | None = None

    def served(self, address: str, state: pb.ServerState) -> None:
        """A server's report: how long its engine has taken steps since its start."""
        with self._lock:
            now, before = state.engine_seconds, self._busy.get(address)
            self._busy[address] = now
            if before is not None:
                # A server that restarted counts from 0.
                grown = now - before if now >= before else now
                self._generated[address] = self._generated.get(address, 0.0) + grown

    def trained(self, seconds: float) -> None:
        """An optimizer step took that long."""
        self._trained += seconds

    def compared(self, figures: GateFigures, released: bool) -> None:
        """The gate's estimates on the newest held-out states."""
        candidate = figures.candidate_acceptance_length
        incumbent = figures.incumbent_acceptance_length
        self._length = incumbent
        if released:
            self._gained += candidate - incumbent
            self._released_length = self._length = candidate

    def measured(self, length: float) -> None:
        """The served draft's estimate on the newest held-out states."""
        self._length = length

    def decide(self, policy_version: int) -> Decision:
        """For the versions from now on."""
        before = self.last
        if before is None or policy_version != before.policy_version:
            self._end_version(first=before is None)
            self.last = self._decide(policy_version, before is None or before.train)
        else:
            self.last = before
        return self.last

    def _end_version(self, first: bool) -> None:
        with self._lock:
            generated, self._generated = self._generated, {}
        trained, gained = self._trained, self._gained
        self._trained = self._gained = 0.0
        if first:
            return
        if generated:
            # Engines generate side by side: a version takes what one of them takes.
            mean = sum(generated.values()) / len(generated)
            self._generation = _smoothed(self._generation, mean)
        if trained:
            self._cost = _smoothed(self._cost, trained * self.config.training_share)
            self._progress = _smoothed(self._progress, gained)

    def _decide(self, version: int, training: bool) -> Decision:
        mode = self.config.mode
        if mode != "when-it-pays":
            return Decision(version, mode == "always", f"economy.mode is {mode}")
        generation, cost, length = self._generation, self._cost, self._length
        if generation is None or cost is None or length is None:
            missing = {
                "generation": generation,
                "training": cost,
                "the draft's acceptance on held-out states": length,
            }
            names = ", ".join(name for name, value in missing.items() if value is None)
            return Decision(version, True, f"not known yet: {names}")
        drifted = max(0.0, (self._released_length or length) - length)
        gain = max(drifted, self._progress or 0.0)
        saving = self.config.horizon_versions * generation * gain / (length + gain)
        train = saving > cost * (STOP if training else START)
        text = (
            f"training {'pays' if train else 'does not pay'}: {gain:.3f} of acceptance length "
            f"{length:.3f} saves {saving:.3g} s of generation in {self.config.horizon_versions} "
            f"policy versions, training for one takes {cost:.3g} s"
        )
        return Decision(version, train, text, saving, cost)


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
