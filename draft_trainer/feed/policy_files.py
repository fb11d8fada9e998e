"""The policy versions' matrices as files, so that a restart can train on the samples it finds."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.refusal import RefusedError, StatusCode

_NAME = "matrix"
_SUFFIX = ".safetensors"


class PolicyFiles:
    """One safetensors file per content. What a killed process left half-written is removed.

    Args:
        folder: its own; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        for path in folder.iterdir():
            if path.suffix != _SUFFIX:
                path.unlink()

    def keep(self, name: str, matrix: Tensor) -> Tensor:
        """Write a matrix under the name of its content, unless it is there.

        Returns:
            The same, mapped from the file: it is in memory once.

        Raises:
            RefusedError: no room (RESOURCE_EXHAUSTED).
        """
        path = self._path(name)
        if not path.exists():
            temporary = path.with_suffix(".part")
            try:
                save_file({_NAME: matrix.contiguous()}, temporary)
                # No fsync: what the page cache has survives the process.
                temporary.replace(path)
            except (OSError, SafetensorError) as error:
                temporary.unlink(missing_ok=True)
                raise RefusedError(
                    "replay.directory",
                    f"{path}: {error}",
                    f"room for a matrix of {matrix.nbytes} bytes",
                    "free some room there, or set another replay.directory",
                    StatusCode.RESOURCE_EXHAUSTED,
                ) from error
        return self.read(name)

    def read(self, name: str) -> Tensor:
        """A matrix that was kept. Raises RefusedError (DATA_LOSS) where it is missing."""
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                matrix: Tensor = file.get_tensor(_NAME)
                return matrix
        except (OSError, SafetensorError) as error:
            raise RefusedError(
                str(path),
                error,
                "the matrix of a policy version that was announced",
                "remove the folder above it: samples that were not trained on yet are lost with it",
                StatusCode.DATA_LOSS,
            ) from error

    def keep_only(self, names: Set[str]) -> None:
        """Remove all others. Matrices that are mapped stay valid."""
        for path in self._folder.iterdir():
            if path.name.removesuffix(_SUFFIX) not in names:
                path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"
