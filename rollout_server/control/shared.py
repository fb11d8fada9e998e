"""Releases on storage that this server shares with the trainer's registry.

Nothing there is trusted: paths stay below the root that ``--shared-registry`` names and follow no
link, and every tensor is verified as if it had been sent. Where something cannot be read the
trainer sends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

from rollout_server.control.stages import Key
from rollout_server.control.upload import BYTES_PER_SECOND, Upload
from slipstream.checkpoints import WEIGHTS_FILE
from slipstream.errors import RefusedError, clean
from slipstream.v1 import tensor_pb2

MAX_PATH_CHARACTERS = 1024
MAX_HEADER_BYTES = 16 << 20

OPEN_SECONDS = 20.0
"""Longest wait for a release beyond its bytes at ``BYTES_PER_SECOND``: a mount may hang."""


class SharedRegistry:
    """Reads releases, one at a time, in a thread of its own: a mount that hangs holds up no more.

    Args:
        root: folder below which it reads; None: it reads nothing.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shared-registry")
        self._reading: Future[Any] | None = None

    async def fill(self, upload: Upload, folder: str) -> str:
        """Read what a stage lacks.

        Args:
            upload: the stage's.
            folder: of the release, below the root.

        Returns:
            Why the rest has to be sent; empty if nothing is missing any more.
        """
        if self._root is None:
            return "this server was started without --shared-registry"
        if self._reading is not None and not self._reading.done():
            return "an earlier read of the shared registry has not ended"
        tensors = _tensors(self._root, folder, list(upload.missing.values()))
        end = time.monotonic() + OPEN_SECONDS + upload.needed_bytes / BYTES_PER_SECOND
        try:
            while True:
                self._reading = self._pool.submit(next, tensors, None)
                read = asyncio.wrap_future(self._reading)
                await asyncio.wait({read}, timeout=max(0.0, end - time.monotonic()))
                if not read.done():
                    return f"{clean(folder)}: not read in time"
                if (tensor := read.result()) is None:
                    return ""
                await upload.take(*tensor)
        except OSError as error:
            return f"{clean(folder)}: {error.strerror or error}"
        except RefusedError as error:
            return str(error)

    def close(self) -> None:
        """Read no more; a read that hangs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _tensors(
    root: Path, folder: str, specs: Sequence[tensor_pb2.TensorSpec]
) -> Iterator[tuple[tensor_pb2.TensorSpec, bytearray]]:
    """Yield the bytes of each tensor of a release.

    Read, not mapped: a file that is cut while it is mapped would end the process.

    Raises:
        OSError: no such file, or it cannot be read.
        RefusedError: another path than one below the root, or no safetensors.
    """
    with _opened(root, folder) as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            begins = [8 + length + header[spec.name]["data_offsets"][0] for spec in specs]
            for begin in begins:
                file.seek(begin)
        except (
            *(ValueError, LookupError, TypeError, OverflowError, RecursionError),
            struct.error,
        ) as error:
            raise RefusedError(folder, error, "safetensors", "look at the release") from error
        for spec, begin in zip(specs, begins, strict=True):
            file.seek(begin)
            data = bytearray(Key.of(spec).size)
            del data[file.readinto(data) :]
            yield spec, data


def _opened(root: Path, folder: str) -> BufferedReader:
    """Open a release's weights. Raises as ``_tensors``."""
    parts = folder.split("/")
    if len(folder) > MAX_PATH_CHARACTERS or "\0" in folder or {"", ".", ".."} & {*parts}:
        next_step = "name a release's folder below publish.shared_registry"
        raise RefusedError("shared_folder", clean(folder, 64), "a folder below it", next_step)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part, kind in [*((part, os.O_DIRECTORY) for part in parts), (WEIGHTS_FILE, 0)]:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | kind
            inner = os.open(part, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{WEIGHTS_FILE} is no plain file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
