"""What the commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from google.protobuf import json_format
from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, object]:
    """A message as JSON, with the fields that are at their default; bytes as base64."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def print_json(value: object) -> None:
    """Print it, indented."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows under each other, columns as wide as they must be; the first row is the head.

    A column whose first row ends with a blank is aligned to the left, others to the right.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i].strip()) for row in texts) for i in range(len(texts[0]))]
    for row in texts:
        cells = [
            cell.strip().ljust(width) if head.endswith(" ") else cell.strip().rjust(width)
            for cell, width, head in zip(row, widths, texts[0], strict=True)
        ]
        print("  ".join(cells).rstrip())


def plain(text: str) -> str:
    """One line without control characters: what others wrote must not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def mebibytes(size: int) -> str:
    """Bytes in MiB, in at least three digits."""
    mib = size / 2**20
    return f"{mib:.0f}" if mib >= 100 else f"{mib:.3g}"


def when(seconds: float) -> str:
    """Seconds since the epoch as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
