"""Weights on the host: a folder of raw tensors for each stage, and how a worker reads them.

The folders lie in a private directory, in shared memory where it fits. Workers map the files, so
nothing is copied between receiving a tensor and loading it. A folder is held as long as its stage,
or the live or previous weights that the stage has become. What a new stage has in common with them
is linked into its folder and need not be sent. All of them together are bounded in bytes.

Only paths, shapes and dtypes cross the engine's RPC, never tensors: vLLM pickles what it passes to
workers, and a policy has gigabytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slipstream.checkpoints import weight_files
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import ChunkAssembler, bytes_of, dtype_from_wire
from slipstream.v1 import tensor_pb2


@dataclass(frozen=True)
class Key:
    """A tensor's content.

    Attributes:
        sha256: hex digest of its bytes.
        dtype: part of the key because whether bytes are finite depends on it.
        size: in bytes.
    """

    sha256: str
    dtype: str
    size: int

    @classmethod
    def of(cls, spec: tensor_pb2.TensorSpec) -> Key:
        """Make a wire tensor's key. Raises RefusedError: not a SHA-256, or a negative size."""
        dtype = dtype_from_wire(spec.dtype, spec.name)
        ChunkAssembler([spec], max_bytes=1 << 62)  # refuses them
        size = math.prod(spec.shape) * dtype.itemsize
        return cls(spec.sha256.hex(), str(dtype).removeprefix("torch."), size)

    def below(self, folder: Path) -> Path:
        """The tensor's file in a stage's folder."""
        return folder / f"{self.sha256}.{self.dtype}"


class StageStore:
    """See the module. Not thread-safe: the event loop owns it, except for ``write``."""

    def __init__(self, directory: Path, capacity: int) -> None:
        self._directory = directory
        self.capacity = capacity
        self._held: dict[Path, frozenset[Key]] = {}
        self._arriving = 0
        # Freeing a gigabyte of shared memory takes half a second.
        self._deleting = ThreadPoolExecutor(1, thread_name_prefix="stage-store")

    @property
    def bytes(self) -> int:
        """Bytes on the host, those that arrive included; what is linked counts once."""
        held = frozenset[Key]().union(*self._held.values())
        return sum(key.size for key in held) + self._arriving

    def new_folder(self) -> Path:
        """A path for a stage's folder; ``receiving`` makes it."""
        return self._directory / uuid.uuid4().hex

    @contextlib.contextmanager
    def receiving(self, folder: Path, keys: Iterable[Key]) -> Iterator[frozenset[Key]]:
        """Make a stage's folder, which is held afterwards; a stage that ends with an error leaves
        nothing.

        Yields:
            The content that nothing has that is held: ``write`` it.

        Raises:
            RefusedError: it does not fit beside what is held (RESOURCE_EXHAUSTED).
        """
        wanted = frozenset(keys)
        there = {
            key: key.below(other)
            for other, contents in self._held.items()
            for key in wanted & contents
        }
        size = sum(key.size for key in wanted - there.keys())
        if self.bytes + size > self.capacity:
            found, code = f"{size} bytes beside {self.bytes}", StatusCode.RESOURCE_EXHAUSTED
            next_step = "abort stages that are not needed, or raise --stage-bytes"
            raise RefusedError("tensors", found, f"at most {self.capacity}", next_step, code)
        self._arriving += size
        try:
            with self._refusing(0):
                folder.mkdir(mode=0o700)
                for key, path in there.items():
                    os.link(path, key.below(folder))
            yield wanted - there.keys()
            self._held[folder] = wanted
        finally:
            self._arriving -= size
            if folder not in self._held:
                self.remove(folder)

    def write(self, folder: Path, key: Key, tensor: torch.Tensor) -> None:
        """Write a tensor's bytes; may run in several threads, for other content each.

        Raises RefusedError: the directory is full, or cannot be written (RESOURCE_EXHAUSTED).
        """
        with self._refusing(key.size):
            key.below(folder).write_bytes(bytes_of(tensor))

    def remove(self, folder: Path | None) -> None:
        """Delete weights. A worker that has a file mapped keeps its pages."""
        if folder is not None:
            self._held.pop(folder, None)
            self._deleting.submit(shutil.rmtree, folder, ignore_errors=True)

    def close(self) -> None:
        """Remove every file."""
        self._deleting.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._held.clear()

    @contextlib.contextmanager
    def _refusing(self, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RefusedError(
                "tensors",
                f"{self._directory} ({error.strerror})",
                f"a directory with {size} bytes free",
                "free some memory or disk space on the rollout server, or lower --stage-bytes",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error


@dataclass(frozen=True)
class StagedTensor:
    """One tensor of a stage.

    Attributes:
        name: parameter name in the checkpoint.
        key: its content.
        shape: sizes, outermost first; their product times the dtype's size is ``key.size``.
        path: file of exactly ``key.size`` raw bytes.
    """

    name: str
    key: Key
    shape: tuple[int, ...]
    path: str

    def map(self) -> torch.Tensor:
        """The tensor over its file's pages, private to this process.

        Raises OSError: the file is missing, or not of the size that the shape needs.
        """
        dtype, size = getattr(torch, self.key.dtype), self.key.size
        found = Path(self.path).stat().st_size
        if found != size:
            raise OSError(f"{self.path}: {found} bytes, {size} needed for {self.name}")
        if size == 0:
            return torch.empty(self.shape, dtype=dtype)
        flat = torch.from_file(self.path, shared=False, size=size, dtype=torch.uint8)
        return flat.view(dtype).reshape(self.shape)


@dataclass(frozen=True)
class WeightSource:
    """All weights of one model: a checkpoint directory, staged tensors, or what vLLM receives.

    Attributes:
        directory: a checkpoint on disk.
        tensors: staged tensors.
        transfer: what ``update_weights`` of the worker's weight-transfer engine takes, as JSON: the
            weights come that way, once, and are not held here.

    Exactly one is set.
    """

    directory: str = ""
    tensors: tuple[StagedTensor, ...] = ()
    transfer: str = ""

    def to_message(self) -> dict[str, Any]:
        """Return plain dicts, for vLLM's RPC."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> WeightSource:
        """The inverse of ``to_message``."""
        tensors = (
            StagedTensor(t["name"], Key(**t["key"]), tuple(t["shape"]), t["path"])
            for t in message["tensors"]
        )
        return cls(message["directory"], tuple(tensors), message["transfer"])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), CPU, memory-mapped.

        Raises OSError: a file is missing or short, or the weights are held nowhere on this host.
        """
        if self.transfer:
            raise OSError("these weights came by vLLM's weight-transfer engine; none are held here")
        for tensor in self.tensors:
            yield tensor.name, tensor.map()
        try:
            files = weight_files(Path(self.directory)) if self.directory else []
        except RefusedError as error:
            raise OSError(str(error)) from error
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict: it has no __iter__)
                    yield name, file.get_tensor(name)


SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "slipstream-rollout-"
# A directory gets its final name once it is locked, so no other server takes it for abandoned.
_UNLOCKED_PREFIX = "slipstream-starting-"
# Open for the life of the process: the kernel releases the locks however the process ends.
_locks: list[int] = []


def make_directory(capacity: int, shared_memory: Path = SHARED_MEMORY) -> Path:
    """A private directory for ``capacity`` bytes: in shared memory if it fits twice, otherwise in
    the folder for temporary files.

    Directories of servers that were killed are removed from both first: they would fill the host's
    memory, or its disk.
    """
    # Hosts may share this folder, and a lock may hold on its own host alone.
    parent, prefix = Path(tempfile.gettempdir()), f"{_PREFIX}{os.uname().nodename}@"
    _remove_abandoned(parent, prefix)
    if shared_memory.is_dir():
        _remove_abandoned(shared_memory, _PREFIX)
        if shutil.disk_usage(shared_memory).free >= 2 * capacity:
            parent, prefix = shared_memory, _PREFIX
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=parent))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _locks.append(lock)
    return made.rename(parent / made.name.replace(_UNLOCKED_PREFIX, prefix))


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for path in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # removed meanwhile, or not a directory of ours
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its server runs
        finally:
            os.close(lock)
