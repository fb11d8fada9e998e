"""What a GET answers: bytes with their type and their ETag, made at most once a second."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

from google.protobuf import json_format
from google.protobuf.message import Message

JSON = "application/json"


@dataclass(frozen=True)
class Document:
    """One answer.

    Args:
        content_type: with the charset.
        body: whole.
        etag: changes with the body.
    """

    content_type: str
    body: bytes
    etag: str

    @classmethod
    def of(cls, content_type: str, body: bytes) -> Document:
        """With the ETag that belongs to it."""
        return cls(content_type, body, f'"{hashlib.sha256(body).hexdigest()[:20]}"')


class Asset:
    """A file of this package: read once."""

    def __init__(self, name: str, content_type: str) -> None:
        file = resources.files("draft_trainer.web") / "assets" / name
        self._document = Document.of(f"{content_type}; charset=utf-8", file.read_bytes())

    def read(self) -> Document:
        """The file."""
        return self._document


class Facts:
    """A message as JSON, made anew at most once in ``SECONDS``, however many ask. Thread-safe.

    Args:
        message: makes it.
    """

    SECONDS = 1.0

    def __init__(self, message: Callable[[], Message]) -> None:
        self._message = message
        self._lock = threading.Lock()
        self._made = float("-inf")
        self._document = Document.of(JSON, b"")

    def read(self) -> Document:
        """The newest, up to ``SECONDS`` old."""
        with self._lock:
            if time.monotonic() - self._made >= self.SECONDS:
                text = json_format.MessageToJson(
                    self._message(),
                    preserving_proto_field_name=True,
                    always_print_fields_with_no_presence=True,
                    indent=None,
                )
                self._document = Document.of(JSON, text.encode())
                self._made = time.monotonic()
            return self._document
