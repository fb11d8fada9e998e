"""The pointer: which release the fleet serves, which one it should, and which ones passed.

Without it a restarted trainer would fall back to the initial draft, and the next sync would push
that to every server. It is one row of state.db, with a checksum; a row that no transition could
have written is refused. ``PointerStore`` alone writes it, one transaction for each event of
``states``.

The live release is on trial until its acceptance length is compared with the last good one's. One
that is replaced before, or that has no traffic, never becomes good: nothing is rolled back to it,
and what comes after it is compared with the last good release.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from draft_trainer.releases.confidence import Figures
from draft_trainer.releases.states import SIDE_EVENTS, ReleaseEvent, ReleaseState, is_legal
from draft_trainer.state import State
from slipstream.errors import RefusedError, StatusCode

if TYPE_CHECKING:
    from draft_trainer.releases.registry import Registry

FIGURES_SECONDS = 3600.0
"""The greatest age of the incumbent's figures when a trial begins or the trainer starts: while a
policy trains between two phases of rollouts, nothing is drafted."""

GOOD_KEPT = 4
"""Releases a roll back can land on; retention spares all of them."""


@dataclass(frozen=True)
class Good:
    """A release that passed its trial.

    Args:
        version: the release.
        ratio: its acceptance length over that of the good release before it, as its trial measured
            them; 1 where there was no trial.
    """

    version: int
    ratio: float = 1.0


@dataclass(frozen=True)
class Pointer:
    """The releases that are wanted, that are served and that passed.

    Args:
        promoted: the release that every server should come to serve.
        live: the release that servers serve. On trial, unless it is the last good one.
        good: the newest ``GOOD_KEPT`` releases that passed, newest last.
        pinned: the gate may not replace ``promoted``.
        intent: a release whose commits have begun and have no outcome yet; None between.
        undecided: why there is no verdict on ``live`` although there should be one; else empty.
        left_good_at: Unix time at which the fleet left the last good release; 0 while it serves it.
        live_at: Unix time at which the fleet came to serve ``live``, if known.
        figures: live acceptance of the last good release, from before the trial.
        figures_at: Unix time at which they were known.
        figures_run: the run that was fed then.

    Raises:
        ValueError: no sequence of transitions leads here.
    """

    promoted: int
    live: int
    good: tuple[Good, ...]
    pinned: bool = False
    intent: int | None = None
    undecided: str = ""
    left_good_at: float = 0.0
    live_at: float | None = None
    figures: Figures = ()
    figures_at: float = 0.0
    figures_run: str = ""

    def __post_init__(self) -> None:
        good = self.good_versions
        legal = (
            0 < len({*good}) == len(good) <= GOOD_KEPT
            and min(self.in_use) >= 0
            and all(math.isfinite(one.ratio) and one.ratio > 0.0 for one in self.good)
            and self.intent != self.live
            and (self.left_good_at > 0.0) == self.on_trial
            and (self.on_trial or not self.undecided)
        )
        if not legal:
            raise ValueError(f"no transition leads to {self!r}")

    @property
    def good_versions(self) -> tuple[int, ...]:
        """The good releases, newest last."""
        return tuple(one.version for one in self.good)

    @property
    def incumbent(self) -> int:
        """The last release that passed: a new one is compared with it."""
        return self.good[-1].version

    @property
    def on_trial(self) -> bool:
        """Return whether the live release has no verdict."""
        return self.live != self.incumbent

    @property
    def standing(self) -> float:
        """The incumbent's acceptance length over that of the best of the recent good releases, by
        the ratios of their trials; at most 1. Releases that each lose a little inside the tolerance
        of a trial use it up together."""
        return min(1.0, *accumulate((one.ratio for one in reversed(self.good)), mul))

    def state_of(self, version: int) -> ReleaseState:
        """Return the state of a release."""
        if version == self.intent:
            return ReleaseState.COMMITTING
        if version == self.live and self.on_trial:
            return ReleaseState.UNDECIDED if self.undecided else ReleaseState.ON_TRIAL
        if version in self.good_versions:
            return ReleaseState.GOOD
        return ReleaseState.PROMOTED if version == self.promoted else ReleaseState.RELEASED

    def known(self, run_id: str, at: float) -> Figures:
        """Return the figures if they hold for this run at that Unix time, else none: another policy
        accepts the same draft differently. Empty ``run_id``: no run is open yet, so none has ended
        the one before."""
        ours = run_id in ("", self.figures_run)
        fits = ours and abs(at - self.figures_at) < FIGURES_SECONDS
        return self.figures if fits else ()

    @property
    def in_use(self) -> frozenset[int]:
        """Releases that may be asked for at any time and must not be removed."""
        used = {self.promoted, self.live, *self.good_versions}
        return frozenset(used | (set() if self.intent is None else {self.intent}))


_POINTER = TypeAdapter(Pointer)


class PointerStore:
    """Reads and moves the pointer, in the transaction under way if there is one. Thread-safe."""

    def __init__(
        self,
        state: State,
        check: Callable[[int], object],
        initial: int = 0,
        run_id: Callable[[], str] = lambda: "",
    ) -> None:
        """Open the pointer; ``initial`` is good where there is none yet.

        Args:
            state: of the registry.
            check: raises RefusedError where a release is not there or damaged.
            initial: release that the fleet serves at first.
            run_id: names the run that is fed; empty before the first.
        """
        self.state = state
        self.run_id = run_id
        self._check = check
        if read_pointer(state) is None:
            self._write(Pointer(initial, initial, (Good(initial),)))

    @property
    def now(self) -> Pointer:
        """The current pointer."""
        pointer = read_pointer(self.state)
        assert pointer is not None
        return pointer

    def offer(self, version: int, against: int | None = None) -> bool:
        """Promote a release that passed the gate, unless one is pinned. True when promoted.

        Args:
            version: the release.
            against: the release that the gate compared it with. If another one is promoted by then,
                it has not passed. None: compared with nothing.
        """
        with self.state.transaction():
            now = self.now
            fits = not now.pinned and against in (None, now.promoted)
            if fits:
                self._move(ReleaseEvent.PROMOTE, version, promoted=version)
            return fits

    def promote(self, version: int, pin: bool) -> None:
        """Promote by hand."""
        self._move(ReleaseEvent.PROMOTE, version, promoted=version, pinned=pin)

    def begin_commit(self, version: int) -> None:
        """Note that the first commit of a release is about to be sent."""
        self._move(ReleaseEvent.BEGIN_COMMIT, version, intent=version)

    def undo_commit(self) -> None:
        """Note that no commit is under way, and that the one that was has changed nothing."""
        with self.state.transaction():
            if (version := self.now.intent) is not None:
                self._move(ReleaseEvent.UNDO, version, intent=None)

    def begin_trial(self, version: int, figures: Figures | None = None) -> None:
        """Note that every server serves a release that has to be compared with the last good one.

        One that was good before, and is tried again, is not good until it passes.

        Args:
            version: the release.
            figures: the last good one's, where they are newer than those that are kept.
        """
        with self.state.transaction():
            now = self.now
            self._move(
                ReleaseEvent.BEGIN_TRIAL,
                version,
                live=version,
                intent=None,
                good=_without(now.good, version),
                left_good_at=now.left_good_at or time.time(),
                figures=now.figures if figures is None else figures,
            )

    def go_live(self, version: int) -> None:
        """Note that every server serves a release that needs no trial."""
        with self.state.transaction():
            now = self.now
            good = now.good if version == now.incumbent else _with(now.good, Good(version))
            figures = now.figures if version == now.incumbent else ()
            self._settle(ReleaseEvent.GO_LIVE, version, live=version, good=good, figures=figures)

    def passed(self, figures: Figures, ratio: float = 1.0) -> None:
        """Note that the live release passed its trial.

        Args:
            figures: its live acceptance.
            ratio: as in ``Good``.
        """
        with self.state.transaction():
            now = self.now
            good = _with(now.good, Good(now.live, ratio))
            self._settle(ReleaseEvent.PASS, now.live, good=good, figures=figures)

    def found_too_little(self, reason: str) -> None:
        """Note that there is no verdict in time on the live release."""
        self._move(ReleaseEvent.FIND_TOO_LITTLE, self.now.live, undecided=reason)

    def measured(self, figures: Figures) -> None:
        """Keep the live acceptance of the last good release, which the fleet serves."""
        self._change(figures=figures)

    def failed(self) -> tuple[int, int]:
        """Note that the live release is worse than the last good one, or that nothing it drafts is
        accepted.

        Returns:
            That release, and the one that every server should serve instead. The gate's next
            release replaces it: no pin holds it.

        Raises:
            RefusedError: FAILED_PRECONDITION, there is no sound one.
        """
        with self.state.transaction():
            now = self.now
            target = self._sound(one for one in now.good if one.version != now.live)
            self._land(ReleaseEvent.FAIL, target, now.promoted == now.live, pinned=False)
            return now.live, target

    def roll_back(self) -> tuple[int, int]:
        """Promote the newest good release before the live one; from a trial, the last good one.

        Returns:
            The release before, and the one that every server should serve now.

        Raises:
            RefusedError: FAILED_PRECONDITION, there is none; or none of them is there any more.
        """
        with self.state.transaction():
            now = self.now
            target = self._sound(now.good if now.on_trial else now.good[:-1])
            self._land(ReleaseEvent.ROLL_BACK, target, True, pinned=now.pinned)
            return now.live, target

    def _sound(self, candidates: Iterable[Good]) -> int:
        """Return the newest of these releases that is there and whole."""
        refused = RefusedError(
            "release",
            f"no release before {self.now.live} that is good",
            "a release that passed its trial before it",
            "promote a release by its number: draft-trainer releases promote N",
            StatusCode.FAILED_PRECONDITION,
        )
        for candidate in reversed([*candidates]):
            try:
                self._check(candidate.version)
            except RefusedError as error:
                refused = error
            else:
                return candidate.version
        raise refused

    def _land(self, event: ReleaseEvent, target: int, promoted: bool, pinned: bool) -> None:
        """Have the fleet serve a good release again; the newer ones are good no longer.

        Args:
            event: why the live release is left.
            target: the good release.
            promoted: whether it is promoted, too.
            pinned: whether it is pinned, if it is promoted.
        """
        now = self.now
        place = now.good_versions.index(target)
        self._settle(
            event,
            now.live,
            live=target,
            good=now.good[: place + 1],
            figures=now.figures if target == now.incumbent else (),
            **({"promoted": target, "pinned": pinned} if promoted else {}),
        )

    def _settle(self, event: ReleaseEvent, version: int, **changes: object) -> None:
        """Leave the fleet on the last good release, with no commit and no trial under way."""
        self._move(event, version, **changes, intent=None, undecided="", left_good_at=0.0)

    def _move(self, event: ReleaseEvent, version: int, **changes: object) -> None:
        """Make the changes that an event of one release brings, all of which the table allows."""
        with self.state.transaction():
            before = self.now
            self._change(**changes)
            after = self.now
            for release in before.in_use | after.in_use | {version}:
                old, new = before.state_of(release), after.state_of(release)
                events = (event,) if release == version else SIDE_EVENTS
                if release != version and old == new:
                    continue
                if not any(is_legal(one, old, new) for one in events):
                    moved = f"draft {release} from {old} to {new}"
                    raise RuntimeError(f"draft {version}, {event}: no event moves {moved}")

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

    def _write(self, pointer: Pointer) -> None:
        with self.state.transaction():
            document = _POINTER.dump_json(pointer)
            self.state.query(
                "INSERT OR REPLACE INTO pointer VALUES (0, ?, ?)",
                document.decode(),
                sha256(document).hexdigest(),
            )


def _with(good: tuple[Good, ...], newest: Good) -> tuple[Good, ...]:
    return (*_without(good, newest.version), newest)[-GOOD_KEPT:]


def _without(good: tuple[Good, ...], version: int) -> tuple[Good, ...]:
    """Leave a release out; the ratio of the next one is to the one before both."""
    left, ratio = list[Good](), 1.0
    for one in good:
        if one.version == version:
            ratio = one.ratio if left else 1.0
        else:
            left.append(replace(one, ratio=one.ratio * ratio))
            ratio = 1.0
    return tuple(left)


def read_pointer(state: State) -> Pointer | None:
    """Read the pointer; None if no trainer ran on the registry. Raises RefusedError: damaged."""
    for document, checksum in state.query("SELECT document, checksum FROM pointer"):
        if not isinstance(document, str) or sha256(document.encode()).hexdigest() != checksum:
            raise state.damaged("a pointer that is not as it was written")
        try:
            return _POINTER.validate_json(document)
        except ValidationError as error:
            raise state.damaged(f"an invalid pointer ({error.errors()[0]['msg']})") from error
    return None


def promote_offline(registry: Registry, version: int, pin: bool) -> None:
    """Have the next trainer put the fleet on a release and try it, whatever state.db says so far.

    Raises:
        RefusedError: no such release, or a damaged one; or a trainer runs on the registry.
    """
    with registry.writing() as state, state.transaction():
        registry.verify(version)
        pointer = PointerStore(state, registry.path, version)
        incumbent, tried = pointer.now.incumbent, False
        if version != incumbent:
            # The fleet cannot go back to a damaged release, so nothing is compared with one.
            with suppress(RefusedError):
                registry.verify(incumbent)
                tried = True
        if not tried:
            pointer.go_live(version)
        elif version != pointer.now.live:
            pointer.begin_trial(version)
        pointer.promote(version, pin)
        state.events.note("committed", draft_version=version, reason="promoted offline")


def roll_back_offline(registry: Registry, reason: str) -> int:
    """Have the next trainer put the fleet on the newest sound release that is good.

    Returns:
        That release.

    Raises:
        RefusedError: there is none; or a trainer runs on the registry.
    """
    with registry.writing() as state, state.transaction():
        failed, version = PointerStore(state, registry.verify).roll_back()
        state.events.note("rolled_back_by_hand", draft_version=failed, reason=reason or "offline")
    return version
