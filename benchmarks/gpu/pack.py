"""``python -m benchmarks.gpu.pack``: wheels for a machine without an index, in parts of 24 MiB.

``split WHEELS PARTS`` cuts every wheel of a folder and writes ``manifest.json`` beside the parts;
``join PARTS WHEELS`` puts them together again. A wheel of which a part is missing or altered is
skipped by name and is not written; pip installs the others with ``--no-index --find-links WHEELS``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Beside a checkout, which has as much, where 64 MiB travel at a time.
PART_BYTES = 24 << 20
MANIFEST = "manifest.json"


def split(wheels: Path, parts: Path, part_bytes: int = PART_BYTES) -> int:
    """Cut every wheel of a folder.

    Args:
        wheels: the folder.
        parts: written there; made if it is missing.
        part_bytes: of a part, at most.

    Returns:
        How many parts were written.
    """
    parts.mkdir(parents=True, exist_ok=True)
    listed: dict[str, Any] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        whole = hashlib.sha256()
        pieces: list[dict[str, str]] = []
        with wheel.open("rb") as file:
            while data := file.read(part_bytes):
                whole.update(data)
                name = f"{wheel.name}.{len(pieces):03d}"
                (parts / name).write_bytes(data)
                pieces.append({"name": name, "sha256": hashlib.sha256(data).hexdigest()})
        listed[wheel.name] = {"sha256": whole.hexdigest(), "parts": pieces}
    (parts / MANIFEST).write_text(json.dumps(listed, indent=1) + "\n")
    return sum(len(each["parts"]) for each in listed.values())


def join(parts: Path, wheels: Path) -> dict[str, str]:
    """Put every wheel together whose parts are all as they were written.

    Args:
        parts: what ``split`` wrote.
        wheels: written there; made if it is missing.

    Returns:
        Why a wheel was skipped, by its name; the manifest's where that cannot be read.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    try:
        listed = json.loads((parts / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return {MANIFEST: f"cannot be read: {error}"}
    skipped: dict[str, str] = {}
    for name, facts in listed.items():
        reason = _joined(parts, wheels, name, facts)
        if reason:
            skipped[name] = reason
    return skipped


def _joined(parts: Path, wheels: Path, name: str, facts: dict[str, Any]) -> str:
    """Empty, or why the wheel was not written."""
    pieces = facts["parts"]
    if any(Path(each).name != each for each in (name, *(piece["name"] for piece in pieces))):
        return "a name in the manifest is a path"
    whole, partial = hashlib.sha256(), wheels / f"{name}.partial"
    reason = ""
    with partial.open("wb") as file:
        for piece in pieces:
            try:
                data = (parts / piece["name"]).read_bytes()
            except OSError:
                reason = f"{piece['name']} is missing"
                break
            if hashlib.sha256(data).hexdigest() != piece["sha256"]:
                reason = f"{piece['name']} is not what was written"
                break
            whole.update(data)
            file.write(data)
    if not reason and whole.hexdigest() != facts["sha256"]:
        reason = "the parts are not the whole wheel"
    if reason:
        partial.unlink()
    else:
        partial.replace(wheels / name)
    return reason


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit status is 1 if a wheel was skipped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack", description=__doc__)
    parser.add_argument("action", choices=("split", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    chosen = parser.parse_args(argv)
    if chosen.action == "split":
        if not any(chosen.source.glob("*.whl")):
            parser.error(f"{chosen.source}: found no wheels; download them there first")
        print(f"{split(chosen.source, chosen.target)} parts")
        return 0
    skipped = join(chosen.source, chosen.target)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    return int(bool(skipped))


if __name__ == "__main__":
    sys.exit(main())
