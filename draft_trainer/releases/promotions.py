"""The pointer: which release the fleet should serve, which it served, which is being committed.

Without it a restarted trainer would fall back to the initial draft and the next sync would push
that to every server. An intent is on disk before its first commit, so that a trainer that is killed
between the commits of two servers knows afterwards that there may be servers to be put back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from draft_trainer.state import State
from slipstream.errors import RefusedError, StatusCode

SERVED_KEPT = 4
"""Releases a roll back can land on; retention spares all of them."""


@dataclass(frozen=True)
class Promotion:
    """What is wanted and what was served.

    Args:
        promoted: the release that every server should serve.
        pinned: the gate may not replace it.
        served: the newest ``SERVED_KEPT`` releases the whole fleet served, oldest first; the last
            is the last good one.
        intent: a release whose commits have begun and have no outcome yet; None between.
        canaries: servers that serve ``intent`` on trial; the others serve the last good one.
        served_at: Unix time at which the fleet came to serve the last good one, if known.
    """

    promoted: int
    pinned: bool
    served: tuple[int, ...]
    intent: int | None = None
    canaries: tuple[str, ...] = ()
    served_at: float | None = None

    @property
    def last_good(self) -> int:
        """The release the fleet ends on when a publish fails."""
        return self.served[-1]

    @property
    def in_use(self) -> frozenset[int]:
        """Releases that may be asked for at any time and must not be removed."""
        intended = () if self.intent is None else (self.intent,)
        return frozenset((self.promoted, *self.served, *intended))

    def wanted_on(self, address: str) -> int:
        """What a server should serve while no publish is under way."""
        on_trial = self.intent is not None and address in self.canaries
        return self.intent if on_trial else self.last_good  # type: ignore[return-value]


class Promotions:
    """The pointer: which release is wanted, was served, and is about to be committed."""

    def __init__(self, state: State, check: Callable[[int], object], initial: int = 0) -> None:
        self.state = state
        self._check = check
        if read_promotion(state) is None:
            self._write(Promotion(initial, False, (initial,)))

    @property
    def now(self) -> Promotion:
        """The current pointer."""
        promotion = read_promotion(self.state)
        assert promotion is not None
        return promotion

    def offer(self, version: int) -> bool:
        """Promote a release that passed the gate, unless one is pinned. True when promoted."""
        with self.state.transaction():
            if not self.now.pinned:
                self._change(promoted=version)
                return True
            return False

    def promote(self, version: int, pin: bool) -> None:
        """Promote by hand."""
        self._change(promoted=version, pinned=pin)

    def intends(self, version: int, canaries: tuple[str, ...] = ()) -> None:
        """``version`` is about to be committed, for good or on some servers on trial."""
        self._change(intent=version, canaries=canaries)

    def undone(self) -> None:
        """What was intended is live on no server that can be reached, or is being undone."""
        self._change(intent=None, canaries=())

    def serves(self, version: int) -> None:
        """Every reachable server serves ``version`` now."""
        with self.state.transaction():
            served = self.now.served
            if served[-1] != version:
                served = (*served, version)[-SERVED_KEPT:]
            self._change(intent=None, canaries=(), served=served)

    def give_up(self, version: int) -> None:
        """``version`` failed its trial: it is wanted no more, and no pin holds it."""
        with self.state.transaction():
            now = self.now
            if now.promoted == version:
                self._change(promoted=now.last_good, pinned=False)
            self.undone()

    def roll_back(self, unpin: bool = False) -> int:
        """Promote the newest release that was served before the current one, and return it.

        Raises:
            RefusedError: FAILED_PRECONDITION, there is none; or none of them is there any more.
        """
        with self.state.transaction():
            now = self.now
            refused = RefusedError(
                "release",
                f"only release {now.last_good} was ever served",
                "a release that was served before it",
                "promote a release by its number: draft-trainer releases promote N",
                StatusCode.FAILED_PRECONDITION,
            )
            for index in range(len(now.served) - 2, -1, -1):
                try:
                    self._change(
                        promoted=now.served[index],
                        pinned=now.pinned and not unpin,
                        served=now.served[: index + 1],
                        intent=None,
                        canaries=(),
                    )
                    return now.served[index]
                except RefusedError as error:
                    refused = error
            raise refused

    def _change(self, **changes: object) -> None:
        with self.state.transaction():
            now = self.now
            changed = replace(now, **changes)  # type: ignore[arg-type]
            for name in ("promoted", "last_good", "intent"):
                version = getattr(changed, name)
                if version not in (None, getattr(now, name)):
                    self._check(version)
            if changed.last_good != now.last_good:
                changed = replace(changed, served_at=time.time())
            if changed != now:
                self._write(changed)

    def _write(self, promotion: Promotion) -> None:
        with self.state.transaction():
            self.state.query(
                "INSERT OR REPLACE INTO promotion VALUES (0, ?, ?, ?, ?, ?, ?)",
                promotion.promoted,
                promotion.pinned,
                json.dumps(promotion.served),
                promotion.intent,
                json.dumps(promotion.canaries),
                promotion.served_at,
            )


def read_promotion(state: State) -> Promotion | None:
    """The pointer; None where no trainer ever ran on the registry. Raises RefusedError: damaged."""
    columns = "promoted, pinned, served, intent, canaries, served_at"
    for promoted, pinned, served, intent, canaries, served_at in state.query(
        f"SELECT {columns} FROM promotion"
    ):
        versions = tuple(map(int, state.names(served)))
        names = state.names(canaries)
        return Promotion(promoted, bool(pinned), versions, intent, names, served_at)
    return None
