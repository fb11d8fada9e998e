"""Decides at every policy version whether training pays, by a rule that a person can compute.

Training for one policy version pays while what it saves exceeds what it costs:

    saves = gain_per_version * generation_seconds_per_version * horizon_versions
    costs = training_seconds_per_version * training_share

- ``gain_per_version``: the share of its time by which training for one version has shortened
  generation. A release whose acceptance length is greater by g than the L before it shortens
  generation by g / (L + g), by the gate's estimates; a candidate that is not released, by nothing.
- ``generation_seconds_per_version``: those of the slowest server, for which a version waits.
- ``horizon_versions``: the versions that a better draft is served (``economy.horizon_versions``).
- ``training_seconds_per_version``: in optimizer steps, over the versions in which there were any.
- ``training_share``: the part of a second of training that the loop loses:
  ``economy.training_share``, or what training took from others on shared cores, or 1 where neither
  is known, as on a GPU.

The measured figures are means in which the newest version has weight ``SMOOTHING``. So that noise
does not switch it, training begins where it saves a share ``HYSTERESIS`` more than it costs, and
ends where it saves that much less.

While training is paused, its gain is not known. So after ``PROBE_VERSIONS`` versions it is tried
again until the gate has judged a candidate: that is a probe. Every run begins with one, because
one run's figures say nothing of another's policy and prompts. While a figure is not known, as where
no server reports, training counts as paying.

Whether servers draft at present is not asked: an untrained draft that pays nowhere yet has to be
trained. Where no draft can pay, as under a load at which steps without drafts are as fast, training
goes on as long as the gate finds gains; ``economy.mode = "never"`` is for that.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from draft_trainer.config import EconomyConfig
from draft_trainer.training.cores import CoreSeconds, core_seconds
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1.release_pb2 import GateFigures

SMOOTHING = 0.5
"""Weight of the newest version in means over versions."""

HYSTERESIS = 0.2
"""Share of the costs by which training must save more to begin, and less to end."""

GROWTH = 1.5
"""Share of what a version was trained on that may come next where training has kept up."""

PROBE_VERSIONS = 8
"""Policy versions of a pause before training is tried again; and versions of training without a
verdict of the gate after which it counts as having gained nothing."""


@dataclass(frozen=True)
class Figures:
    """The inputs of the rule, named as in the status; None while not known."""

    gain_per_version: float | None
    generation_seconds_per_version: float | None
    horizon_versions: int
    training_seconds_per_version: float | None
    training_share: float | None

    @property
    def saves(self) -> float | None:
        """Seconds of generation that training for one version saves; None while not known."""
        gain, generation = self.gain_per_version, self.generation_seconds_per_version
        if gain is None or generation is None:
            return None
        return gain * generation * self.horizon_versions

    @property
    def costs(self) -> float | None:
        """Seconds of the loop that training for one version costs; None while not known."""
        seconds, share = self.training_seconds_per_version, self.training_share
        return None if seconds is None or share is None else seconds * share


@dataclass(frozen=True)
class Decision:
    """The decision for one policy version, its reason in words, and the figures behind it."""

    policy_version: int
    train: bool
    reason: str
    figures: Figures


class Economy:
    """Keeps the figures and the last decision. ``served`` is thread-safe; the rest belongs to the
    training thread.

    Attributes:
        tokens: trained on since the policy version of the last decision, every epoch counted.

    Args:
        config: the [economy] section.
        cores: returns what this process has had of the cores so far; None where unknown.
    """

    def __init__(
        self, config: EconomyConfig, cores: Callable[[], CoreSeconds | None] = core_seconds
    ) -> None:
        self.config = config
        self._cores = cores
        self._lock = threading.Lock()
        self._engine_seconds: dict[str, float] = {}
        self._generated: dict[str, float] = {}
        self._key: str | None = None
        self.begin("")

    def begin(self, key: str) -> None:
        """Forget all figures where another run begins, or another history of one (``Run.key``)."""
        if key == self._key:
            return
        self._key = key
        self.last: Decision | None = None
        # Sums over the current version.
        self._cores_before = self._cores()
        self._trained = self._shortened = 0.0
        self.tokens, self._dry = 0, False
        self._judged = False
        # Means over versions.
        config = self.config
        self.figures = Figures(None, None, config.horizon_versions, None, config.training_share)
        self._unjudged = 0
        self._probing, self._probe_at = True, math.inf
        # Tokens of the last two versions with training, and whether it ran dry: one of them may be
        # short, or begin long before its states come.
        self._recent: deque[tuple[int, bool]] = deque(maxlen=2)
        self._trainable = 0

    @property
    def paused(self) -> bool:
        """Return whether training is paused."""
        return self.config.mode == "never" if self.last is None else not self.last.train

    @property
    def wants_states(self) -> bool:
        """Return whether the states that the next policy version's step captures may be trained on,
        which is in the version after it."""
        last = self.last
        return not self.paused or (last is not None and last.policy_version + 2 >= self._probe_at)

    @property
    def trainable(self) -> int:
        """Return the tokens of a policy version, every epoch counted, that training keeps up with;
        0 until once it has not kept up with what came."""
        if not self._trainable or not self._dry:
            return self._trainable
        return max(self._trainable, math.ceil(GROWTH * self.tokens))

    def served(self, address: str, state: pb.ServerState) -> None:
        """Take a server's report of how long its engine has taken steps since its start."""
        if not state.HasField("engine_seconds"):
            return
        with self._lock:
            now, before = state.engine_seconds, self._engine_seconds.get(address)
            self._engine_seconds[address] = now
            if before is not None:
                # A server that restarted counts from 0.
                grown = now - before if now >= before else now
                self._generated[address] = self._generated.get(address, 0.0) + grown

    def trained(self, seconds: float, tokens: int = 0) -> None:
        """Count an optimizer step that took so long, on so many tokens."""
        self._trained += seconds
        self.tokens += tokens

    def ran_dry(self) -> None:
        """Note that nothing is left to train on."""
        self._dry = self._dry or self.tokens > 0

    def compared(self, figures: GateFigures, released: bool, pinned: bool = False) -> None:
        """Take the gate's verdict on a candidate.

        Args:
            figures: the candidate's.
            released: whether it was promoted.
            pinned: whether no candidate can be promoted. If not pinned, one that passed and was not
                promoted, as on a full disk, is no evidence that training gains nothing.
        """
        if released:
            gain = figures.difference
            self._shortened += gain / (figures.incumbent_acceptance_length + gain)
        self._judged = self._judged or released or pinned or not figures.passed

    def decide(self, policy_version: int) -> Decision:
        """Decide for the versions from now on; ``policy_version`` is the newest."""
        last = self.last
        if last is None or policy_version != last.policy_version:
            began = last is not None and last.train and not self._probing
            self._end_version(first=last is None)
            self.last = last = self._decide(policy_version, began)
        return last

    def _end_version(self, first: bool) -> None:
        """Put what the version has brought into the figures; the first one began before the run."""
        cores, before = self._cores(), self._cores_before
        self._cores_before = cores
        with self._lock:
            slowest, self._generated = max(self._generated.values(), default=None), {}
        trained, self._trained = self._trained, 0.0
        if self.tokens and not first:
            self._recent.append((self.tokens, self._dry))
            used = sum(tokens for tokens, _ in self._recent) // len(self._recent)
            if len(self._recent) == 2 and not any(dry for _, dry in self._recent):
                self._trainable = used
            elif self._trainable:
                self._trainable = max(self._trainable, math.ceil(GROWTH * used))
        self.tokens, self._dry = 0, False
        if first:
            return
        gain, generation, _, training, share = vars(self.figures).values()
        # The first version's reports may arrive after its end.
        if slowest or (slowest is not None and generation is not None):
            generation = _smoothed(generation, slowest)
        if trained:
            self._unjudged += 1
            training = _smoothed(training, trained)
            if self.config.training_share is None:
                took = trained
                if cores is not None and before is not None:
                    took = cores.taken_since(before)
                share = _smoothed(share, took / trained)
        if self._judged or (gain is not None and self._unjudged >= PROBE_VERSIONS):
            # A candidate may span several versions, and the last one is judged in a pause.
            gain = _smoothed(gain, self._shortened / max(self._unjudged, 1))
            self._shortened, self._judged, self._unjudged = 0.0, False, 0
            self._probing = False
        self.figures = Figures(gain, generation, self.config.horizon_versions, training, share)

    def _decide(self, version: int, began: bool) -> Decision:
        """Apply the rule; ``began``: training is under way, and goes on while it pays."""
        figures, mode = self.figures, self.config.mode
        if mode != "when-it-pays":
            return Decision(version, mode == "always", f"economy.mode is {mode}", figures)
        saves, costs = figures.saves, figures.costs
        if saves is None or costs is None:
            names = ", ".join(name for name, value in vars(figures).items() if value is None)
            text = f"not known yet, so training counts as paying: {names}"
            return Decision(version, True, text, figures)
        needed = costs * (1 - HYSTERESIS if began else 1 + HYSTERESIS)
        pays = saves > needed
        text = (
            f"training {'pays' if pays else 'does not pay'}: for one version it saves {saves:.3g} "
            f"s of generation and costs {costs:.3g} s, so it pays above {needed:.3g} s"
        )
        if not (pays or self._probing or self.paused):
            # A pause begins.
            self._probe_at = version + PROBE_VERSIONS
        self._probing = not pays and (self._probing or version >= self._probe_at)
        if self._probing:
            text = f"tried for a verdict of the gate; {text}"
        return Decision(version, pays or self._probing, text, figures)


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
