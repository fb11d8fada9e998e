"""``python -m benchmarks.gpu.pack``: wheels for a machine without an index.

``slim WHEEL FOLDER --drop PATTERN ...`` writes a wheel without files that are not needed there.
``split WHEELS PARTS --mib N`` cuts every wheel of a folder; the parts are in folders ``0``, ``1``
and so on, each of at most N MiB with a ``manifest.json``. ``bootstrap --parts`` puts them together.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

PART_BYTES = 24 << 20
MANIFEST = "manifest.json"


def slim(wheel: Path, folder: Path, drop: Sequence[str]) -> Path:
    """Write a wheel without the files whose names match a pattern, and return it.

    Its RECORD lists what is left. In a pattern, as ``fnmatch`` has them, "*" matches "/" too.

    Raises ValueError: a pattern matches no file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(target, "w") as rest:
        entries = whole.infolist()
        for pattern in drop:
            if not any(fnmatch(entry.filename, pattern) for entry in entries):
                raise ValueError(f"--drop: found {pattern}, which matches no file of {wheel.name}")
        for entry in entries:
            if any(fnmatch(entry.filename, pattern) for pattern in drop):
                continue
            data = whole.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = io.StringIO()
                csv.writer(lines, lineterminator="\n").writerows(
                    row
                    for row in csv.reader(data.decode().splitlines())
                    if row and not any(fnmatch(row[0], pattern) for pattern in drop)
                )
                data = lines.getvalue().encode()
            rest.writestr(entry, data, compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)
    return target


def split(wheels: Path, parts: Path, part_bytes: int = PART_BYTES) -> int:
    """Cut every wheel of a folder.

    Args:
        wheels: the folder.
        parts: written there, in folders by number; made if it is missing.
        part_bytes: of the pieces in such a folder, at most.

    Returns:
        How many folders were written.
    """
    listed: dict[str, Any] = {}
    folders: list[Path] = []
    room = 0
    for wheel in sorted(wheels.glob("*.whl")):
        pieces: list[dict[str, str]] = []
        with wheel.open("rb") as file:
            while data := file.read(room or part_bytes):
                if not room:
                    folders.append(parts / str(len(folders)))
                    folders[-1].mkdir(parents=True)
                    room = part_bytes
                room -= len(data)
                name = f"{wheel.name}.{len(pieces):03d}"
                (folders[-1] / name).write_bytes(data)
                pieces.append({"name": name, "sha256": hashlib.sha256(data).hexdigest()})
        with wheel.open("rb") as file:
            whole = hashlib.file_digest(file, "sha256").hexdigest()
        listed[wheel.name] = {"sha256": whole, "parts": pieces}
    for folder in folders:
        (folder / MANIFEST).write_text(json.dumps(listed, indent=1) + "\n")
    return len(folders)


def join(parts: Path, wheels: Path) -> dict[str, str]:
    """Put every wheel together whose parts are all as they were written.

    Args:
        parts: what ``split`` wrote, or the files of its folders in one.
        wheels: written there; made if it is missing.

    Returns:
        Why a wheel was skipped, by its name; the manifest's where that cannot be read.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    files = {path.name: path for path in parts.rglob("*") if path.is_file()}
    try:
        listed = json.loads(files.get(MANIFEST, parts / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return {MANIFEST: f"cannot be read: {error}"}
    skipped: dict[str, str] = {}
    for name, facts in listed.items():
        reason = _joined(files, wheels, name, facts)
        if reason:
            skipped[name] = reason
    return skipped


def _joined(files: dict[str, Path], wheels: Path, name: str, facts: dict[str, Any]) -> str:
    """Empty, or why the wheel was not written."""
    pieces = facts["parts"]
    if Path(name).name != name:
        return "its name is a path"
    whole, partial = hashlib.sha256(), wheels / f"{name}.partial"
    reason = ""
    with partial.open("wb") as file:
        for piece in pieces:
            if piece["name"] not in files:
                reason = f"{piece['name']} is missing"
                break
            data = files[piece["name"]].read_bytes()
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
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack", description=__doc__)
    add = parser.add_argument
    add("action", choices=("slim", "split"))
    add("source", type=Path, help="a wheel, or a folder of wheels")
    add("target", type=Path, help="the folder that is written")
    add("--drop", nargs="+", default=(), metavar="PATTERN", help="names of files that slim omits")
    add("--mib", type=int, default=PART_BYTES >> 20, help="of a folder of parts, at most")
    chosen = parser.parse_args(argv)
    if chosen.action == "slim":
        written = slim(chosen.source, chosen.target, chosen.drop)
        print(f"{written}: {written.stat().st_size / 2**20:.1f} MiB")
    elif any(chosen.source.glob("*.whl")):
        print(f"{split(chosen.source, chosen.target, chosen.mib << 20)} folders")
    else:
        parser.error(f"{chosen.source}: found no wheels; download them there first")
    return 0


if __name__ == "__main__":
    sys.exit(main())
