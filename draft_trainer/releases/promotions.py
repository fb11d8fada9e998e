"""Which release the fleet should serve, which releases passed, and which is on trial.

Without this record, a restarted trainer would fall back to the initial draft, and the next sync
would push that to every server. An intent is on disk before its first commit, so that a trainer
killed between the commits of two servers knows after its restart which servers to check.

A release is good once its live acceptance has stood a trial against the last one that did. One that
was replaced, has no traffic to be judged on, or no figures to be compared with, is undecided:
nothing is ever rolled back to it, and what comes after it is compared with the last good release.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from draft_trainer.state import State
from slipstream.errors import RefusedError, StatusCode

if TYPE_CHECKING:
    from draft_trainer.releases.registry import Registry

HISTORY_SECONDS = 300.0
"""How far back the acceptance of a release counts that nothing is compared with yet."""

FIGURES_SECONDS = 3600.0
"""How old what is known of the incumbent may be when a trial begins or the trainer starts: while a
policy trains between two phases of rollouts, nothing is drafted."""

GOOD_KEPT = 4
"""Releases a roll back can land on; retention spares all of them."""


@dataclass(frozen=True)
class Batch:
    """Verification steps of one draft version between two reports.

    Args:
        tried: steps whose draft had a token at each position; all of them had a first one.
        accepted: of these tokens.
    """

    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    def __add__(self, other: Batch) -> Batch:
        return Batch(_sums(self.tried, other.tried), _sums(self.accepted, other.accepted))

    @property
    def drafts(self) -> int:
        """Verification steps."""
        return self.tried[0] if self.tried else 0

    def since(self, before: Batch) -> Batch:
        """What a server counted since ``before``; all of it where the server began anew."""
        grown = self + Batch(
            *(tuple(-n for n in counts) for counts in (before.tried, before.accepted))
        )
        return grown if min((*grown.tried, *grown.accepted), default=0) >= 0 else self


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


Figures = tuple[Batch, ...]
"""Live acceptance, oldest first."""


@dataclass(frozen=True)
class Trial:
    """A release whose live acceptance is compared with the last good one's.

    Args:
        version: on trial, and live.
        incumbent: the last good release.
        began_at: Unix time at which the fleet left the last good release.
        undecided: why there is no verdict although there should be one; empty until then.
    """

    version: int
    incumbent: int
    began_at: float = 0.0
    undecided: str = ""


@dataclass(frozen=True)
class Promotion:
    """What is wanted and what is served.

    Args:
        promoted: the release that every server should come to serve.
        live: the release that servers serve.
        good: the newest ``GOOD_KEPT`` releases that passed a trial, newest last.
        pinned: the gate may not replace ``promoted``.
        intent: a release whose commits have begun and have no outcome yet; None between.
        trial: the one under way, if any.
        figures: of the incumbent, from before the trial.
        figures_at: Unix time at which they were known.
        figures_run: the run that was fed then.
        live_at: Unix time at which the fleet came to serve ``live``, if known.
    """

    promoted: int
    live: int
    good: tuple[int, ...]
    pinned: bool = False
    intent: int | None = None
    trial: Trial | None = None
    figures: Figures = ()
    figures_at: float = 0.0
    figures_run: str = ""
    live_at: float | None = None

    @property
    def incumbent(self) -> int:
        """What a new release is compared with: the last one that passed."""
        return self.live if self.trial is None else self.trial.incumbent

    def known(self, run_id: str, at: float) -> Figures:
        """The figures, where they say something of this run at that Unix time: another policy
        accepts the same draft otherwise. Empty ``run_id``: no run is open yet, so none has ended
        the one before."""
        ours = run_id in ("", self.figures_run)
        fits = ours and abs(at - self.figures_at) < FIGURES_SECONDS
        return self.figures if fits else ()

    @property
    def in_use(self) -> frozenset[int]:
        """Releases that may be asked for at any time and must not be removed."""
        used = {self.promoted, self.live, self.incumbent, *self.good}
        return frozenset(used | (set() if self.intent is None else {self.intent}))


_PROMOTION = TypeAdapter(Promotion)


class Promotions:
    """Reads and moves the pointer, in the transaction under way if there is one."""

    def __init__(
        self,
        state: State,
        check: Callable[[int], object],
        initial: int = 0,
        run_id: Callable[[], str] = lambda: "",
    ) -> None:
        """``run_id`` is of the run that is fed; empty before the first."""
        self.state = state
        self.run_id = run_id
        self._check = check
        if read_promotion(state) is None:
            self._write(Promotion(initial, initial, (initial,)))

    @property
    def now(self) -> Promotion:
        """The current pointer."""
        promotion = read_promotion(self.state)
        assert promotion is not None
        return promotion

    def offer(self, version: int, against: int | None = None) -> bool:
        """Promote a release that passed the gate, unless one is pinned. True when promoted.

        Args:
            version: the release.
            against: what the gate compared it with. If another one is promoted by then, it has not
                passed. None: compared with nothing.
        """
        with self.state.transaction():
            now = self.now
            fits = not now.pinned and against in (None, now.promoted)
            if fits:
                self._change(promoted=version)
            return fits

    def promote(self, version: int, pin: bool) -> None:
        """Promote by hand."""
        self._change(promoted=version, pinned=pin)

    def intends(self, version: int) -> None:
        """``version`` is about to be committed."""
        self._change(intent=version)

    def undone(self) -> None:
        """No commit is under way any more."""
        self._change(intent=None)

    def serves(self, version: int, figures: Figures = ()) -> None:
        """Every reachable server serves ``version``, which passed its trial or needs none."""
        with self.state.transaction():
            now = self.now
            good = (*(v for v in now.good if v != version), version)[-GOOD_KEPT:]
            if version == now.incumbent and not figures:
                figures = now.figures
            self._change(live=version, good=good, figures=figures)
            self._change(intent=None, trial=None)

    def on_trial(self, trial: Trial, figures: Figures | None = None) -> None:
        """A release is live, and has no verdict.

        Args:
            trial: replaces the one under way.
            figures: the incumbent's, where they are newer than those that are kept.
        """
        with self.state.transaction():
            kept = self.now.figures if figures is None else figures
            self._change(live=trial.version, trial=trial, figures=kept, intent=None)

    def measured(self, figures: Figures) -> None:
        """The incumbent's live acceptance, while the fleet serves it."""
        self._change(figures=figures)

    def failed(self) -> tuple[int, int]:
        """What is on trial, or is live without one, is shown to be worse than the last good one.

        Returns:
            That release, and the one that every server should serve instead. The gate's next
            release replaces it: no pin holds it.

        Raises:
            RefusedError: FAILED_PRECONDITION, there is no sound one.
        """
        with self.state.transaction():
            now = self.now
            version = now.live
            others = [v for v in (*now.good, now.incumbent) if v != version]
            target = self._sound(version, others)
            good = tuple(v for v in others if v != target)
            figures = now.figures if target == now.incumbent else ()
            self._change(live=target, good=(*good, target)[-GOOD_KEPT:], figures=figures)
            self._change(intent=None, trial=None)
            if now.promoted == version:
                self._change(promoted=target, pinned=False)
            return version, target

    def roll_back(self, trials: bool = True) -> tuple[int, int]:
        """Promote the newest good release before the live one; from a trial, the last good one.

        Args:
            trials: a release that is not the one last compared with is tried again, where there are
                figures of that one.

        Returns:
            The release before, and the one that every server should serve now.

        Raises:
            RefusedError: FAILED_PRECONDITION, there is none; or none of them is there any more.
        """
        with self.state.transaction():
            now = self.now
            version = now.live
            place = now.good.index(version) if version in now.good else len(now.good)
            target = self._sound(version, now.good[:place])
            trial, figures, at = None, now.figures, time.time()
            if target != now.incumbent:
                if trials and now.known(self.run_id(), at):
                    trial = Trial(target, now.incumbent, began_at=at)
                else:
                    figures = ()
            good = now.good[: now.good.index(target) + 1]
            self._change(promoted=target, live=target, good=good, figures=figures)
            self._change(intent=None, trial=trial)
            return version, target

    def _sound(self, version: int, candidates: Iterable[int]) -> int:
        """The last one that is there and whole."""
        refused = RefusedError(
            "release",
            f"no release before {version} that is good",
            "a release that passed its trial before it",
            "promote a release by its number: draft-trainer releases promote N",
            StatusCode.FAILED_PRECONDITION,
        )
        for candidate in reversed(list(candidates)):
            try:
                self._check(candidate)
            except RefusedError as error:
                refused = error
            else:
                return candidate
        raise refused

    def _change(self, **changes: object) -> None:
        with self.state.transaction():
            now = self.now
            changed = replace(now, **changes)  # type: ignore[arg-type]
            for name in ("promoted", "live", "intent"):
                version = getattr(changed, name)
                if version not in (None, getattr(now, name)):
                    self._check(version)
            if changed.live != now.live:
                changed = replace(changed, live_at=time.time())
            if changed.figures != now.figures:
                at, run_id = time.time(), self.run_id() or now.figures_run
                changed = replace(changed, figures_at=at, figures_run=run_id)
            if changed != now:
                self._write(changed)

    def _write(self, promotion: Promotion) -> None:
        with self.state.transaction():
            document = _PROMOTION.dump_json(promotion).decode()
            self.state.query("INSERT OR REPLACE INTO promotion VALUES (0, ?)", document)


def read_promotion(state: State) -> Promotion | None:
    """The pointer; None where no trainer ever ran on the registry. Raises RefusedError: damaged."""
    for (document,) in state.query("SELECT document FROM promotion"):
        try:
            promotion = _PROMOTION.validate_json(document)
        except ValidationError as error:
            raise state.damaged(f"a pointer that is none ({error.errors()[0]['msg']})") from error
        if promotion.trial is not None and promotion.trial.version != promotion.live:
            # An earlier edition tried it on some servers: those go back to the live one.
            return replace(promotion, trial=None)
        return promotion
    return None


def promote_offline(registry: Registry, version: int, pin: bool) -> None:
    """Have the next trainer put the fleet on a release and try it, whatever state.db says so far.

    Raises:
        RefusedError: no such release, or a damaged one; or a trainer runs on the registry.
    """
    with registry.writing() as state, state.transaction():
        registry.verify(version)
        promotions = Promotions(state, registry.path, version)
        incumbent, trial = promotions.now.incumbent, None
        if version != incumbent:
            # The fleet cannot go back to a damaged one: nothing is compared then.
            with suppress(RefusedError):
                registry.verify(incumbent)
                trial = Trial(version, incumbent, began_at=time.time())
        if trial is None:
            promotions.serves(version)
        else:
            promotions.on_trial(trial)
        promotions.promote(version, pin)
        state.events.note("committed", draft_version=version, reason="promoted offline")


def roll_back_offline(registry: Registry, reason: str) -> int:
    """Have the next trainer put the fleet on the newest sound release that is good.

    Returns:
        That release.

    Raises:
        RefusedError: there is none; or a trainer runs on the registry.
    """
    with registry.writing() as state, state.transaction():
        failed, version = Promotions(state, registry.verify).roll_back()
        state.events.note("rolled_back_by_hand", draft_version=failed, reason=reason or "offline")
    return version
