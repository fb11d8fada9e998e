"""Training states on disk, from which a killed run resumes with the same bits.

One safetensors file per state. Its header names the format, the step, the position in the data,
what the state belongs to, and a SHA-256 over all of that and every tensor's bytes. A file is
written to a temporary name, fsynced and renamed, so that a kill at any instant leaves the one
before. The training thread pays for a copy in memory only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draft_trainer.drafters import DraftShape
from draft_trainer.files import SAFETENSORS_PART, written_whole
from draft_trainer.training.learner import Learner
from slipstream.errors import RefusedError, StatusCode
from slipstream.shortage import raise_unless_shortage
from slipstream.tensors import bytes_of

logger = logging.getLogger(__name__)

FORMAT = "slipstream.training_state"
VERSION = 1
KEPT = 2
_NAME = re.compile(r"state-(\d{12})\.safetensors")
_TEMPORARY = re.compile(rf"\.state-\d{{12}}\.safetensors-.*|{SAFETENSORS_PART}")

Facts = Mapping[str, object]
"""Names and JSON-able values."""


class TrainingState(NamedTuple):
    """One state as it was read: tensors, step and position as they were given to ``save``."""

    tensors: dict[str, Tensor]
    step: int
    position: dict[str, Any]


class StateStore:
    """The newest two training states in a folder of their own. One process writes at a time.

    Args:
        folder: made when it is missing. What a killed process left half-written is removed.
        belongs_to: what a state must have been saved with to be loaded here, compared name by
            name: the head's configuration (``head_facts``), the data, whatever makes another
            run's state wrong for this one.
        on_written: told the position of every state that ``write`` has put on disk, on another
            thread.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        belongs_to: Facts,
        on_written: Callable[[Facts], None] = lambda position: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve(strict=True)
        self._belongs_to = json.loads(json.dumps(dict(belongs_to)))
        self._on_written = on_written
        self._thread: threading.Thread | None = None
        for path in self.folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()

    @property
    def free(self) -> bool:
        """Return whether no state is being written."""
        return self._thread is None or not self._thread.is_alive()

    def write(
        self,
        tensors: Mapping[str, Tensor],
        step: int,
        position: Facts,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Save on a thread of its own; none may be running, and the tensors must not change.

        A state that cannot be written is logged as an error and dropped: training goes on.

        Args:
            tensors, step, position: see ``save``.
            ready: called on that thread; returns when the tensors are whole.
        """
        assert self.free
        # Daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._save,
            args=(tensors, step, position, ready),
            name="state-writer",
            daemon=True,
        )
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Wait for the last ``write``; return False if it is not done in ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.free

    def save(self, tensors: Mapping[str, Tensor], step: int, position: Facts) -> Path:
        """Write a state; when this returns it survives kill -9 and a loss of power.

        Args:
            tensors: contiguous, on the CPU, none a view of another; not kept.
            step: not below that of any state here.
            position: what ``load`` is to give back.

        Raises:
            OSError: it could not be written; the states before it are as they were.
        """
        path = self._path(step)
        facts = {
            "format": FORMAT,
            "version": str(VERSION),
            "step": str(step),
            "position": json.dumps(dict(position), sort_keys=True),
            "belongs_to": json.dumps(self._belongs_to, sort_keys=True),
        }
        facts["sha256"] = _digest(facts, tensors)
        with written_whole(path) as temporary:
            save_file(dict(tensors), temporary, facts)
        for old in self._steps()[:-KEPT]:
            self._path(old).unlink()
        return path

    def clear(self) -> None:
        """Remove every state: another training begins here."""
        for step in self._steps():
            self._path(step).unlink()

    def load(self) -> TrainingState | None:
        """Read the newest sound state; None where none was ever saved.

        A damaged file is skipped for the one before it, with an error in the log.

        Raises:
            RefusedError: the newest readable state is of another format version or belongs to
                something else (FAILED_PRECONDITION), or all of them are damaged (DATA_LOSS).
        """
        damaged: list[str] = []
        for step in reversed(self._steps()):
            path = self._path(step)
            try:
                state = self._read(path, step)
            except _DamagedError as error:
                damaged.append(f"{path.name}: {error}")
                continue
            for text in damaged:
                logger.error(
                    "skipped a damaged training state, resuming from step %s: %s", step, text
                )
            return state
        if damaged:
            found, expected = "; ".join(damaged), "at least one sound training state"
            advice = "restore one, or remove the folder to train on from the weights alone"
            raise RefusedError(str(self.folder), found, expected, advice, StatusCode.DATA_LOSS)
        return None

    def _save(
        self,
        tensors: Mapping[str, Tensor],
        step: int,
        position: Facts,
        ready: Callable[[], None],
    ) -> None:
        try:
            ready()
            self.save(tensors, step, position)
        except OSError as error:
            # A full disk must not end training; the next state may fit.
            logger.error("the training state of step %d was not written: %s", step, error)
        else:
            self._on_written(position)

    def _read(self, path: Path, step: int) -> TrainingState:
        try:
            with safe_open(path, framework="pt") as file:
                facts = dict(file.metadata() or {})
                digest = facts.pop("sha256", None)
                # Before the hash is checked: another version may compute it differently.
                if facts.get("format") == FORMAT and facts.get("version") != str(VERSION):
                    raise _unfit("version", facts.get("version"), VERSION, path)
                # Cloned: what stays mapped would change with the file.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise _DamagedError(str(error)) from error
        if digest != _digest(facts, tensors):
            raise _DamagedError("its SHA-256 is not that of its content")
        found = json.loads(facts["belongs_to"])
        for name in sorted(self._belongs_to.keys() | found.keys()):
            # A switch that is off may be missing: the version that saved it may not have had it.
            if (found.get(name) or None) != (self._belongs_to.get(name) or None):
                raise _unfit(name, found.get(name), self._belongs_to.get(name), path)
        return TrainingState(tensors, step, json.loads(facts["position"]))

    def _path(self, step: int) -> Path:
        return self.folder / f"state-{step:012d}.safetensors"

    def _steps(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)


def head_facts(config: DraftShape) -> dict[str, object]:
    """Return a head's configuration for ``belongs_to``."""
    return {f"head.{name}": value for name, value in asdict(config).items()}


class _DamagedError(Exception):
    """Checksum mismatch, or an unreadable file."""


def _unfit(name: str, found: object, expected: object, path: Path) -> RefusedError:
    advice = "resume with what the state was saved with, or remove its folder to start over"
    code = StatusCode.FAILED_PRECONDITION
    return RefusedError(f"training state {name}", f"{found} in {path}", expected, advice, code)


def _digest(facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the header's facts and every tensor's name, type, shape and bytes."""
    total = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(bytes_of(tensor))
    return total.hexdigest()


FOLDER = "training-state"
_WAIT_S = 30.0


@dataclass(frozen=True)
class Position:
    """The point that a restart resumes from, beside the learner's tensors.

    Attributes:
        newest_release: draft version of the newest release that was made from it.
        run_id: the run that is trained on; empty before the first step.
        draws: number of the last draw that the weights have seen; None before the first.
    """

    newest_release: int
    run_id: str = ""
    draws: int | None = None


class HostCopies:
    """Copies of a device's tensors on the host, one set at a time.

    What is on a GPU is copied by a stream of its own into locked pages, which are allocated once:
    neither the host nor the next step waits.
    """

    def __init__(self) -> None:
        self._pages: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def take(
        self, tensors: Mapping[str, Tensor], device: torch.device
    ) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Begin to copy tensors; the copies taken before are overwritten.

        Args:
            tensors: by name, on ``device`` or on the CPU; must not change before the event.
            device: the tensors' device; work queued there so far is done before the copies.

        Returns:
            The copies, whole after the event; at once if there is none.
        """
        if device.type == "cpu":
            return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}, None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        locked = torch.cuda.is_available()
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                if name not in self._pages:
                    self._pages[name] = torch.empty(
                        tensor.shape, dtype=tensor.dtype, pin_memory=locked
                    )
                self._pages[name].copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return {name: self._pages[name] for name in tensors}, event


class LearnerStates:
    """Saves a serving trainer's learner every few steps. For the training thread only.

    A state carries the number of the last draw that its weights have seen, so that a restart can
    undo the later ones; see ``draft_trainer.ingest.store``.

    Args:
        registry: folder of the releases, in which the states get a folder of their own.
        belongs_to: see ``StateStore``.
        every_steps: optimizer steps between two states; 0 writes and reads none. While one is
            being written the next is put off.
        every_seconds: least time between two states, but for those that a release needs.
        on_saved: told the last draw of every state that is on disk, on another thread.
    """

    def __init__(
        self,
        registry: Path,
        belongs_to: Facts,
        every_steps: int,
        every_seconds: float = 0.0,
        on_saved: Callable[[int], None] = lambda draws: None,
    ) -> None:
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._on_saved = on_saved
        self._saved_at = -1
        self._saved_time = time.monotonic()
        self._copies = HostCopies()
        self._store = (
            StateStore(registry / FOLDER, belongs_to, self._written) if every_steps else None
        )

    def resume(self, learner: Learner, newest_release: int) -> Position:
        """Put the newest state into ``learner`` unless a release is newer than it.

        Args:
            learner: has the weights of ``newest_release``.
            newest_release: the newest sound one.

        Raises:
            RefusedError: the state is of another head, draft or format, or all are damaged.
        """
        state = self._store.load() if self._store else None
        if self._store is None or state is None:
            return Position(newest_release)
        # Higher than newest_release where the release that it was saved after is damaged.
        newest = int(state.position["newest_release"])
        if newest < newest_release:
            # Its weights are older than the release's, by more than a kill ever loses.
            logger.warning(
                "training state of step %d is from before release %d and is not resumed",
                *(state.step, newest_release),
            )
            self._store.clear()
            return Position(newest_release)
        learner.load_state_dict(state.tensors)
        self._saved_at = learner.steps
        logger.info("resumed the training state of step %d", state.step)
        return Position(
            newest, str(state.position["run_id"]), int(state.position.get("draws") or 0)
        )

    def after_step(self, learner: Learner, position: Position) -> None:
        """Save when it is time and the last one is written."""
        passed = time.monotonic() - self._saved_time >= self._every_seconds
        due = self._store and passed and learner.steps >= self._saved_at + self._every_steps
        if due and self._store and self._store.free:
            self.save(learner, position)

    def save(self, learner: Learner, position: Position) -> None:
        """Save now, as after a release."""
        if self._store is None:
            return
        if not self._store.wait(_WAIT_S):
            logger.error("the training state of step %d was not written in time", learner.steps)
            return
        try:
            tensors, copied = self._copies.take(learner.tensors, learner.head.device)
        except RuntimeError as error:
            raise_unless_shortage(error)
            # Training goes on without it; the next one may find memory.
            logger.error("the training state of step %d was not saved: %s", learner.steps, error)
            self._saved_time = time.monotonic()
            return
        ready = copied.synchronize if copied is not None else lambda: None
        if copied is not None:
            learner.change_after(copied)
        self._store.write(tensors, learner.steps, asdict(position), ready)
        self._saved_at, self._saved_time = learner.steps, time.monotonic()

    def moved(self) -> None:
        """Note that a gate changed the learner's pace without a step: the last state is older."""
        self._saved_at -= 1

    def save_last(self, learner: Learner, position: Position) -> None:
        """Save what was learned since the last state, and wait until it is written."""
        if learner.steps > max(self._saved_at, 0):
            self.save(learner, position)
        if self._store is not None and not self._store.wait(_WAIT_S):
            logger.error("the last training state was not written in time")

    def _written(self, position: Facts) -> None:
        draws = position["draws"]
        if isinstance(draws, int):
            try:
                self._on_saved(draws)
            except RefusedError as error:
                # A full disk: the next state's draws are noted instead.
                logger.error("the saved state was not noted: %s", error)
