"""Releases that retention never removes: one small file in the registry, replaced atomically."""

from __future__ import annotations

import json
from pathlib import Path

from draft_trainer.durable import written_whole
from slipstream.refusal import RefusedError

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
