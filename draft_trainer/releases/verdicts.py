"""The gate's verdicts, those on candidates that were dropped too: a bounded log in the registry."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from google.protobuf import json_format

from draft_trainer.durable import written_whole
from slipstream.refusal import RefusedError
from slipstream.v1 import release_pb2

VERDICTS_FILE = "verdicts.jsonl"
KEPT = 500


class VerdictLog:
    """The newest ``KEPT`` verdicts, on disk as soon as ``add`` returns. Thread-safe.

    Args:
        root: the registry's folder.
        on_add: told of every verdict.

    Raises:
        RefusedError: the file is not what this class writes.
    """

    def __init__(
        self,
        root: Path,
        on_add: Callable[[release_pb2.Verdict], None] = lambda verdict: None,
    ) -> None:
        self._on_add = on_add
        self._path = root / VERDICTS_FILE
        self._lock = threading.Lock()
        self._verdicts = deque(read_verdicts(root), maxlen=KEPT)

    def add(self, verdict: release_pb2.Verdict) -> None:
        """Keep one more. Raises OSError: it is kept until the process ends, but not on disk."""
        self._on_add(verdict)
        with self._lock:
            self._verdicts.append(verdict)
            with written_whole(self._path) as temporary, temporary.open("w") as file:
                file.writelines(f"{_line(one)}\n" for one in self._verdicts)

    def newest(self, count: int) -> list[release_pb2.Verdict]:
        """The newest so many (0: all), oldest first."""
        with self._lock:
            return list(self._verdicts)[-count:]


def read_verdicts(root: Path) -> list[release_pb2.Verdict]:
    """The verdicts of a registry, oldest first; none where there is no log.

    Raises:
        RefusedError: the file is not what ``VerdictLog`` writes.
    """
    path = root / VERDICTS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json_format.Parse(line, release_pb2.Verdict()) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, json_format.ParseError, AttributeError) as error:
        raise RefusedError(
            str(path),
            str(error),
            "one verdict a line, as the trainer writes them",
            "restore the file, or move it away to start a new log",
        ) from error


def _line(verdict: release_pb2.Verdict) -> str:
    return json_format.MessageToJson(
        verdict, preserving_proto_field_name=True, indent=None, ensure_ascii=False
    )
