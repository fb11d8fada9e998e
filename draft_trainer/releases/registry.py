"""Immutable draft releases on disk: directories that vLLM loads as they are.

One release on disk: what is in its folder, and whether it is what was released.

Looking at a release checks its names, its manifest, its config.json and the size of its weights,
which costs no read of the weights; ``read_tensors`` checks every tensor's SHA-256.

Which releases go, and how one goes: by a rename first, so that none is ever half there.

Releases that retention never removes: one small file in the registry, replaced atomically.

Which releases stay: those in use, those that are pinned, and the newest within the bounds.

How a trainer opens its registry: held against others, cleaned, with the initial draft in it.

Which release the fleet should serve: one small file in the registry, replaced atomically.

Without it a restarted trainer would fall back to the initial draft and the next
sync would push that to every server. What is about to be committed is in it before
the first commit, so that a trainer that is killed between the commits of two servers
knows afterwards that there may be servers to be put back.
"""

from __future__ import annotations

import filecmp
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from google.protobuf import json_format
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draft_trainer.checkpoints.draft import CONFIG_FILE, WEIGHTS_FILE, pickles
from draft_trainer.config import DraftConfig
from draft_trainer.counters import PublishLog
from draft_trainer.drafters import DRAFTERS, Draft, Drafter
from draft_trainer.files import WriterLock, folder_written_whole, written_whole
from slipstream.errors import RefusedError, StatusCode
from slipstream.metrics import code_version
from slipstream.tensors import spec_of
from slipstream.v1 import release_pb2

MANIFEST_FILE = "manifest.json"
FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE)
_NAME = re.compile(r"release-([0-9]{6,19})")


def folder_name(version: int) -> str:
    """The name of a release's folder in its registry."""
    return f"release-{version:06d}"


def version_of(name: str) -> int | None:
    """The inverse; None for any other name, another spelling of the same number included."""
    match = _NAME.fullmatch(name)
    version = int(match.group(1)) if match else None
    return version if version is not None and folder_name(version) == name else None


def check_names(path: Path) -> None:
    """Raise RefusedError where a release is, or holds, a link or a pickle."""
    for part in (path, *sorted(path.iterdir())):
        if part.is_symlink():
            raise RefusedError(
                str(part),
                "a symbolic link",
                "a plain directory with plain files, as it was written",
                "restore the release from a copy; releases are never links",
                StatusCode.DATA_LOSS,
            )
    for name in pickles(path):
        raise RefusedError(
            str(path / name),
            "a pickle",
            f"nothing but {', '.join(FILES)}",
            "remove it, and find out who put it there: pickles run code",
            StatusCode.DATA_LOSS,
        )


def write_manifest(path: Path, manifest: release_pb2.ReleaseManifest) -> None:
    """Complete ``manifest`` from the config.json and weights in a folder, and put it there.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    weights = path / WEIGHTS_FILE
    tensors = load_file(weights)
    manifest.tensors.extend(spec_of(name, tensors[name]) for name in sorted(tensors))
    manifest.config_json = (path / CONFIG_FILE).read_text()
    manifest.weights_bytes = weights.stat().st_size
    manifest.created_at = time.time()
    manifest.code_version = code_version()
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    (path / MANIFEST_FILE).write_text(text + "\n")


def read_manifest(path: Path, version: int) -> release_pb2.ReleaseManifest:
    """A release's manifest, if folder, config.json and size of the weights agree with it.

    Args:
        path: the release's folder.
        version: that it is known by.

    Raises:
        RefusedError: DATA_LOSS, with the file and what differs.
    """
    check_names(path)
    file = path / MANIFEST_FILE
    try:
        manifest = json_format.Parse(file.read_text(), release_pb2.ReleaseManifest())
    except (OSError, UnicodeDecodeError, json_format.ParseError, RecursionError) as error:
        raise damaged(file, str(error)) from error
    if manifest.draft_version != version:
        raise damaged(file, f"draft_version {manifest.draft_version}", f"{version}, as the folder")
    try:
        config_json = (path / CONFIG_FILE).read_text()
        size = (path / WEIGHTS_FILE).stat().st_size
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from error
    if config_json != manifest.config_json:
        raise damaged(path / CONFIG_FILE, "not the text in the manifest")
    if not manifest.HasField("weights_bytes") or size != manifest.weights_bytes:
        stated = manifest.weights_bytes if manifest.HasField("weights_bytes") else "no size"
        raise damaged(path / WEIGHTS_FILE, f"{size} bytes", f"{stated}, as in the manifest")
    return manifest


def read_tensors(path: Path, manifest: release_pb2.ReleaseManifest) -> dict[str, Tensor]:
    """The weights by name, each verified against the manifest's SHA-256.

    Raises:
        RefusedError: DATA_LOSS, a tensor is missing, unknown or not the one released.
    """
    file = path / WEIGHTS_FILE
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise damaged(file, str(error)) from error
    wanted = {spec.name: spec for spec in manifest.tensors}
    if tensors.keys() != wanted.keys():
        raise damaged(file, f"tensors {sorted(tensors)}", f"{sorted(wanted)}")
    for name, tensor in tensors.items():
        if spec_of(name, tensor) != wanted[name]:
            raise damaged(file, f"tensor {name} is not the one released")
    return tensors


def verify(path: Path, manifest: release_pb2.ReleaseManifest) -> None:
    """Check every byte that the manifest answers for, and that nothing else is there.

    Raises:
        RefusedError: DATA_LOSS, with the file and what differs.
    """
    read_tensors(path, manifest)
    for extra in sorted({part.name for part in path.iterdir()} - set(FILES)):
        raise damaged(path / extra, "a file that was not released", "nothing")


def same_content(path: Path, other: Path) -> bool:
    """Whether two folders hold the same checkpoint, byte for byte.

    Raises:
        RefusedError: DATA_LOSS, a file is missing in ``path``.
    """
    try:
        return all(
            filecmp.cmp(path / name, other / name, shallow=False)
            for name in (CONFIG_FILE, WEIGHTS_FILE)
        )
    except FileNotFoundError as error:
        raise damaged(path, str(error)) from error


def size_on_disk(path: Path) -> int:
    """Bytes of the files in a folder, links not followed."""
    return sum(part.lstat().st_size for part in path.iterdir())


def damaged(path: Path, found: str, expected: str = "the bytes that were released") -> RefusedError:
    """What is raised for a release that is not what was released."""
    return RefusedError(
        str(path),
        found,
        expected,
        "restore the release from a copy, or roll back to another one",
        StatusCode.DATA_LOSS,
    )


# What a killed process leaves: folders and files that were being written or removed.
_LEFTOVER = re.compile(r"\.(staging|removed|release|pins\.json|verdicts\.jsonl)-.*")


def beyond_bounds(
    sizes: Mapping[int, int], keep: int, keep_bytes: int | None, spared: Collection[int]
) -> list[int]:
    """The releases that retention removes, oldest first.

    Args:
        sizes: bytes of every release, by draft version, oldest first.
        keep: releases beyond the newest so many go.
        keep_bytes: while all that stay take more than this together, further ones go; None: no
            bound.
        spared: these stay, whatever the bounds.
    """
    total, gone = sum(sizes.values()), []
    for number, (version, size) in enumerate(sizes.items()):
        too_many = number < len(sizes) - keep
        too_large = keep_bytes is not None and total > keep_bytes
        if version not in spared and (too_many or too_large):
            gone.append(version)
            total -= size
    return gone


def remove_folder(path: Path) -> None:
    """Remove a release. A kill in between leaves a leftover, not half a release."""
    doomed = path.with_name(f".removed-{path.name}-{os.getpid()}-{time.time_ns()}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(root: Path) -> int:
    """Remove what killed processes left in ``root``; returns how many files and folders."""
    leftovers = [path for path in root.iterdir() if _LEFTOVER.fullmatch(path.name)]
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return len(leftovers)


PINS_FILE = "pins.json"


def read_pins(root: Path) -> frozenset[int]:
    """The pinned draft versions. Raises RefusedError: not a file that ``write_pins`` wrote."""
    path = root / PINS_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, list) or not all(type(version) is int for version in raw):
            raise ValueError("not a list of whole numbers")
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise RefusedError(
            str(path),
            str(error),
            "a list of draft versions, for example [3, 7]",
            "restore the file, or remove it and pin the releases again",
        ) from error
    return frozenset(raw)


def write_pins(root: Path, pins: frozenset[int]) -> None:
    """Replace them. Raises OSError: the folder cannot be written, or the disk is full."""
    with written_whole(root / PINS_FILE) as temporary:
        temporary.write_text(json.dumps(sorted(pins)) + "\n", encoding="utf-8")


class Registry:
    """The releases under one directory. Thread-safe; one process writes, any number read.

    A release is written to a temporary name, fsynced and renamed: it is there whole or not at all.

    Args:
        root: the directory; made if it is missing.
        drafter: the mechanism whose drafts it holds.
    """

    def __init__(self, root: Path, drafter: Drafter = DRAFTERS["eagle3"]) -> None:
        self.drafter = drafter
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve(strict=True)
        self._lock = threading.RLock()
        self._writer = WriterLock(self.root)
        self._held = False
        self._busy: Counter[int] = Counter()

    def hold(self) -> None:
        """Keep every other process from writing until ``close``; else each write takes the lock.

        Raises:
            RefusedError: FAILED_PRECONDITION, another one writes it.
        """
        with self._lock:
            self._writer.__enter__()
            self._held = True

    def close(self) -> None:
        """Let go of what ``hold`` took, if it did."""
        with self._lock:
            if self._held:
                self._held = False
                self._writer.__exit__()

    def create(
        self,
        head: Draft,
        *,
        parent: int | None,
        trained_against: int | None,
        run_id: str,
        ttt_steps: int,
        gate: release_pb2.GateFigures | None,
        dtype: torch.dtype = torch.bfloat16,
        source: release_pb2.ReleaseSource = release_pb2.RELEASE_SOURCE_TRAINED,
        draft_sample_method: str = "",
        num_speculative_tokens: int = 0,
        origin: str = "",
    ) -> release_pb2.ReleaseManifest:
        """Write a new release, numbered one above the newest and written like the oldest.

        A server takes releases whose tensors have the names of the draft it was started with, so
        layout, fields and names stay those of the imported draft; without one they are plain.

        Args:
            head: the weights.
            parent: draft version that training started from, if any.
            trained_against: newest policy version whose states were trained on, if any.
            run_id, ttt_steps, source, draft_sample_method, num_speculative_tokens, origin: see
                ``ReleaseManifest``; 0 and empty where nobody knows.
            gate: the gate's figures, if it was gated.
            dtype: element type of the weights.

        Raises:
            RefusedError: the head is not of the releases' configuration, the oldest release is
                damaged, or another process writes the registry.
        """
        manifest = release_pb2.ReleaseManifest(
            parent_version=parent,
            trained_against_policy_version=trained_against,
            run_id=run_id,
            ttt_steps=ttt_steps,
            gate=gate,
            source=source,
            draft_sample_method=draft_sample_method,
            num_speculative_tokens=num_speculative_tokens,
            origin=origin,
        )
        with self._lock, self._writer:
            versions = self.versions()
            manifest.draft_version = max(versions, default=-1) + 1
            like = self.path(versions[0]) if versions else None
            with self._new(manifest) as staging:
                self.drafter.save(staging, head, dtype, like=like)
        return manifest

    def import_initial(
        self, directory: Path, policy: Path | None = None
    ) -> release_pb2.ReleaseManifest:
        """Make a draft checkpoint release 0.

        Byte for byte, where vLLM reads exactly the head that is in it. Otherwise it is written so
        that vLLM does: without what it cannot load, without a copy of the policy's embeddings,
        and with the layer numbers in vLLM's place and meaning. Importing the same checkpoint
        again returns release 0 as it is.

        Args:
            directory: the checkpoint, in any layout (see ``checkpoint``).
            policy: the folder of its policy, where the checkpoint does not say everything.

        Raises:
            RefusedError: not a draft checkpoint that the trainer can represent, or release 0
                exists and is another one.
        """
        checkpoint = self.drafter.read(directory, policy)

        def write(folder: Path) -> None:
            if not checkpoint.as_stored:
                return checkpoint.write(folder)
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(directory / name, folder / name)

        with self._lock, self._writer:
            if not self.versions():
                manifest = release_pb2.ReleaseManifest(
                    source=release_pb2.RELEASE_SOURCE_INITIAL, origin=str(directory)
                )
                with self._new(manifest) as staging:
                    write(staging)
                return manifest
            with TemporaryDirectory(prefix=".staging-", dir=self.root) as temporary:
                write(Path(temporary))
                if self.versions()[0] == 0 and same_content(self.path(0), Path(temporary)):
                    return self.get(0)
            raise RefusedError(
                str(directory),
                "another checkpoint than release 0 of this registry",
                f"an empty registry, or the checkpoint that release 0 in {self.root} is",
                "point the registry at a new directory, or give the original draft; a draft that "
                "somebody else trained is imported: draft-trainer releases import DIR",
                StatusCode.FAILED_PRECONDITION,
            )

    def versions(self) -> tuple[int, ...]:
        """Every release that is there, oldest first; their content is not looked at."""
        found = (version_of(p.name) for p in self.root.iterdir() if p.is_dir())
        return tuple(sorted(version for version in found if version is not None))

    def list(self) -> list[release_pb2.ReleaseManifest]:
        """The manifests of all releases, oldest first. Raises RefusedError where one is damaged."""
        with self._lock:
            return [self.get(version) for version in self.versions()]

    def get(self, version: int) -> release_pb2.ReleaseManifest:
        """One manifest. Raises RefusedError: no such release, or it is not what was released."""
        with self._lock:
            return read_manifest(self.path(version), version)

    def path(self, version: int) -> Path:
        """The directory of a release. Raises RefusedError: none, or a link or pickle is in it."""
        path = self.root / folder_name(version)
        if version < 0 or not path.is_dir():
            raise RefusedError(
                "draft_version",
                version,
                f"one of {list(self.versions())}",
                "list the releases; old ones are pruned",
                StatusCode.NOT_FOUND,
            )
        check_names(path)
        return path

    def tensors(self, version: int) -> dict[str, Tensor]:
        """The weights of a release by name, each verified against the manifest's SHA-256.

        Raises:
            RefusedError: no such release, or a file is missing or differs from the manifest.
        """
        with self.using(version):
            return read_tensors(self.path(version), self.get(version))

    def verify(self, version: int) -> None:
        """Check every byte of a release. Raises RefusedError with what differs."""
        with self.using(version):
            verify(self.path(version), self.get(version))

    def nbytes(self, version: int) -> int:
        """Bytes of a release on disk; 0 where it was removed meanwhile."""
        try:
            return size_on_disk(self.root / folder_name(version))
        except FileNotFoundError:
            return 0

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Spare a release from ``prune`` of this process for the length of a ``with`` block."""
        with self._lock:
            self._busy[version] += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy.subtract((version,))
                self._busy = +self._busy

    def busy(self) -> frozenset[int]:
        """Releases that are being used right now."""
        with self._lock:
            return frozenset(self._busy)

    def pin(self, version: int, pinned: bool) -> None:
        """Spare a release from ``prune``, or no longer; survives restarts.

        Raises:
            RefusedError: no such release, or another process writes the registry.
            OSError: the pins cannot be written.
        """
        with self._lock, self._writer:
            self.path(version)
            # Pins of releases that somebody removed by hand go with the next change.
            pins = self.pins() & set(self.versions())
            write_pins(self.root, pins | {version} if pinned else pins - {version})

    def pins(self) -> frozenset[int]:
        """The pinned releases."""
        return read_pins(self.root)

    def prune(
        self, keep: int, protect: Collection[int], keep_bytes: int | None = None
    ) -> tuple[int, ...]:
        """Remove old releases (``beyond_bounds``); never the newest, a pinned or busy one.

        Args:
            keep: at least 1.
            protect: draft versions that stay.
            keep_bytes: None: no bound.

        Returns: the versions removed, oldest first.
        """
        if keep < 1:
            raise RefusedError("keep", keep, "at least 1", "keep at least the newest release")
        with self._lock, self._writer:
            sizes = {version: self.nbytes(version) for version in self.versions()}
            spared = {*protect, *self.pins(), *self.busy(), max(sizes, default=0)}
            # A link is refused wherever it is met, and never followed into a removal.
            spared |= {v for v in sizes if (self.root / folder_name(v)).is_symlink()}
            removed = beyond_bounds(sizes, keep, keep_bytes, spared)
            for version in removed:
                remove_folder(self.root / folder_name(version))
        return tuple(removed)

    def remove_leftovers(self) -> int:
        """Remove what killed processes left half-written; returns how many files and folders."""
        with self._lock, self._writer:
            return remove_leftovers(self.root)

    @contextmanager
    def _new(self, manifest: release_pb2.ReleaseManifest) -> Iterator[Path]:
        """Yield a folder for config.json and weights; it becomes the release ``manifest``."""
        path = self.root / folder_name(manifest.draft_version)
        with folder_written_whole(path) as staging:
            yield staging
            write_manifest(staging, manifest)


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


logger = logging.getLogger(__name__)

Uses = Callable[[], list[tuple[int, str]]]
"""Releases in use, each with a word that says for what; may name one several times."""


def uses_of(promotion: Promotion) -> list[tuple[int, str]]:
    """What the fleet may ask for at any time."""
    uses = [(promotion.promoted, "promoted"), (promotion.last_good, "served")]
    if promotion.previous is not None:
        uses.append((promotion.previous, "previous"))
    staged = promotion.in_use - {version for version, _ in uses}
    return uses + [(version, "staged") for version in sorted(staged)]


class Retention:
    """Removes old releases of a registry. Thread-safe.

    Args:
        registry: theirs.
        keep_releases: those beyond the newest so many go.
        keep_bytes: while all take more than this together, the oldest go.
        in_use: these stay whatever the bounds. Asked right before anything is removed.
    """

    def __init__(
        self, registry: Registry, keep_releases: int, keep_bytes: int, in_use: Uses
    ) -> None:
        self._registry = registry
        self._keep_releases = keep_releases
        self._keep_bytes = keep_bytes
        self._in_use = in_use

    def apply(self) -> None:
        """Remove what is beyond the bounds; what cannot be removed is logged and tried again."""
        try:
            # Release 0 is what a restart compares the initial draft with.
            spared = {0, *(version for version, _ in self._in_use())}
            self._registry.prune(self._keep_releases, spared, self._keep_bytes)
        except (OSError, RefusedError) as error:
            logger.error("old releases were not removed: %s", error)

    def uses(self) -> list[release_pb2.ReleaseUse]:
        """Every release, oldest first, with why it stays."""
        return list_uses(self._registry, self._in_use())


def list_uses(registry: Registry, in_use: list[tuple[int, str]]) -> list[release_pb2.ReleaseUse]:
    """Every release of a registry, oldest first: bytes, damage, and why retention spares it."""
    versions, pins, busy = registry.versions(), registry.pins(), registry.busy()
    uses = []
    for version in versions:
        kept_as = [word for number, word in in_use if number == version]
        kept_as += [
            word
            for word, applies in (
                ("initial", version == 0),
                ("newest", version == versions[-1]),
                ("pinned", version in pins),
                ("busy", version in busy),
            )
            if applies
        ]
        uses.append(
            release_pb2.ReleaseUse(
                draft_version=version,
                kept_as=kept_as,
                bytes=registry.nbytes(version),
                damage=_damage(registry, version),
            )
        )
    return uses


def _damage(registry: Registry, version: int) -> str:
    try:
        registry.get(version)
    except RefusedError as error:
        return str(error)
    return ""


def open_registry(draft: DraftConfig) -> Registry:
    """The registry, held against other writers, with the initial draft as release 0.

    Raises:
        RefusedError: the folder cannot be written, is another process's, or was started from
            another draft.
    """
    try:
        registry = Registry(draft.registry, DRAFTERS[draft.kind])
        registry.hold()
        try:
            registry.remove_leftovers()
            registry.import_initial(draft.initial, draft.policy)
        except BaseException:
            registry.close()
            raise
    except OSError as error:
        raise RefusedError(
            "draft.registry",
            f"{error.filename or draft.registry} ({error.strerror})",
            "a folder that can be made and written",
            "check its owner, its mode and the free space, or set another draft.registry",
        ) from error
    return registry


def newest_own(registry: Registry) -> release_pb2.ReleaseManifest:
    """The newest release that was trained here, or release 0: what training goes on from.

    Never an imported one: the training state and the optimizer's moments are of these.

    Raises:
        RefusedError: it, or one that is newer, is damaged.
    """
    manifests = (registry.get(version) for version in reversed(registry.versions()))
    imported = release_pb2.RELEASE_SOURCE_IMPORTED
    return next(manifest for manifest in manifests if manifest.source != imported)
