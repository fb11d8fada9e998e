"""Which release the fleet should serve: one small file in the registry, replaced atomically.

Without it a restarted trainer would fall back to the initial draft and the next
sync would push that to every server. What is about to be committed is in it before
the first commit, so that a trainer that is killed between the commits of two servers
knows afterwards that there may be servers to be put back.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from draft_trainer.releases.publish_log import PublishLog
from slipstream.refusal import RefusedError, StatusCode

FILE_NAME = "promoted.json"
HISTORY = 16


@dataclass(frozen=True)
class Promotion:
    """What is wanted and what was served.

    Args:
        promoted: the release that every server should serve.
        pinned: the gate may not replace it.
        served: releases the whole fleet served, oldest first; the last is the last good one.
        intent: a release whose commits have begun and were not settled yet; None between.
        canaries: servers that serve ``intent`` on trial; the others serve the last good one.
    """

    promoted: int
    pinned: bool
    served: tuple[int, ...]
    intent: int | None = None
    canaries: tuple[str, ...] = ()

    @property
    def last_good(self) -> int:
        """The release the fleet ends on when a publish fails."""
        return self.served[-1]

    @property
    def previous(self) -> int | None:
        """The release served before the last good one, if any."""
        return self.served[-2] if len(self.served) > 1 else None

    @property
    def in_use(self) -> frozenset[int]:
        """Releases that may be asked for at any time and must not be removed."""
        intended = () if self.intent is None else (self.intent,)
        return frozenset((self.promoted, *self.served[-2:], *intended))

    def wanted_on(self, address: str) -> int:
        """What a server should serve while no publish is under way."""
        on_trial = self.intent is not None and address in self.canaries
        return self.intent if on_trial else self.last_good  # type: ignore[return-value]


class Promotions:
    """The pointer and its file. Every change is on disk before it is visible.

    Args:
        root: the registry's folder.
        initial: what is promoted and served where there is no file yet.
        on_note: see ``PublishLog``.

    Raises:
        RefusedError: the file is not what this class writes, or cannot be written.
    """

    def __init__(
        self,
        root: Path,
        initial: int,
        on_note: Callable[[str, int, str], None] = lambda *event: None,
    ) -> None:
        self._path = root / FILE_NAME
        self.log = PublishLog(root, on_note)
        self._lock = threading.Lock()
        self._served_at: float | None = None
        if self._path.exists():
            self._now = _read(self._path)
        else:
            self._now = Promotion(initial, False, (initial,))
            self._write(self._now)

    @property
    def now(self) -> Promotion:
        """The current pointer."""
        with self._lock:
            return self._now

    @property
    def served_at(self) -> float | None:
        """Unix time at which this process put the fleet on ``last_good``; None before."""
        with self._lock:
            return self._served_at

    def offer(self, version: int) -> bool:
        """Promote a release that passed the gate, unless one is pinned. True when promoted."""
        with self._lock:
            if self._now.pinned:
                return False
            self._set(replace(self._now, promoted=version))
            return True

    def promote(self, version: int, pin: bool) -> None:
        """Promote by hand."""
        with self._lock:
            self._set(replace(self._now, promoted=version, pinned=pin))

    def intends(self, version: int, canaries: Sequence[str] = ()) -> None:
        """``version`` is about to be committed, for good or on some servers on trial."""
        with self._lock:
            self._set(replace(self._now, intent=version, canaries=tuple(canaries)))

    def undone(self) -> None:
        """What was intended is live on no server that can be reached, or is being undone."""
        with self._lock:
            if self._now.intent is not None:
                self._set(replace(self._now, intent=None, canaries=()))

    def serves(self, version: int) -> None:
        """Every reachable server serves ``version`` now."""
        with self._lock:
            now = replace(self._now, intent=None, canaries=())
            if now.last_good != version:
                now = replace(now, served=(*now.served, version)[-HISTORY:])
            if now != self._now:
                self._set(now)

    def give_up(self, version: int) -> None:
        """``version`` failed its trial: it is wanted no more, and no pin holds it."""
        with self._lock:
            now = replace(self._now, intent=None, canaries=())
            if now.promoted == version:
                now = replace(now, promoted=now.last_good, pinned=False)
            self._set(now)

    def roll_back(self, unpin: bool = False) -> int:
        """Promote the release that was served before the current one, and return it.

        Args:
            unpin: let the gate replace it.

        Raises:
            RefusedError: FAILED_PRECONDITION, there is none.
        """
        with self._lock:
            previous = self._now.previous
            if previous is None:
                raise RefusedError(
                    "release",
                    f"only release {self._now.last_good} was ever served",
                    "a release that was served before it",
                    "promote a release by its number: draft-trainer releases promote N",
                    StatusCode.FAILED_PRECONDITION,
                )
            self._set(
                replace(
                    self._now,
                    promoted=previous,
                    pinned=self._now.pinned and not unpin,
                    served=self._now.served[:-1],
                    intent=None,
                    canaries=(),
                )
            )
            return previous

    def _set(self, promotion: Promotion) -> None:
        self._write(promotion)
        if promotion.last_good != self._now.last_good:
            self._served_at = time.time()
        self._now = promotion

    def _write(self, promotion: Promotion) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(asdict(promotion), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise RefusedError(
                "draft.registry",
                f"{self._path} ({error.strerror})",
                "a folder that can be written",
                "check its owner, its mode and the free space",
                StatusCode.FAILED_PRECONDITION,
            ) from error


def read_promotion(root: Path) -> Promotion | None:
    """The pointer of a registry without owning it; None where no trainer ever ran on it.

    Raises:
        RefusedError: the file is not what ``Promotions`` writes.
    """
    path = root / FILE_NAME
    return _read(path) if path.exists() else None


def _read(path: Path) -> Promotion:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        intent = raw.get("intent")
        promotion = Promotion(
            int(raw["promoted"]),
            bool(raw["pinned"]),
            tuple(raw["served"]),
            None if intent is None else int(intent),
            tuple(str(address) for address in raw.get("canaries", ())),
        )
        if not promotion.served or not all(isinstance(v, int) for v in promotion.served):
            raise ValueError("served must name at least one release")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(
            str(path),
            str(error),
            '{"promoted": N, "pinned": false, "served": [N, ...]}',
            "restore the file, or remove it to start from the oldest release",
        ) from error
    return promotion
