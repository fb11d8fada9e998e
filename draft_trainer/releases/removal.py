"""Which releases go, and how one goes: by a rename first, so that none is ever half there."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path

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
