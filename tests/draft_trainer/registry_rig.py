"""Releases for tests: written, listed, damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draft_trainer.releases.registry import Registry
from slipstream.v1 import release_pb2
from tests.draft_trainer.synthetic import head


def create(registry: Registry, seed: int = 0, **changes: Any) -> release_pb2.ReleaseManifest:
    """A release of random weights."""
    model = head(seed)
    fields = {"run_id": "run", "ttt_steps": 3, **changes}
    return registry.create(model, release_pb2.ReleaseManifest(**fields))


def names(folder: Path) -> set[str]:
    """Return what is in a folder, except state.db and what belongs to it."""
    names = (path.name for path in folder.iterdir())
    return {name for name in names if not name.startswith("state.")}


def flip(path: Path, old: str, new: str) -> None:
    """Replace a piece of a text file by one that must have been there."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def flip_bit(path: Path) -> None:
    """Change one bit of the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
