"""Bearer tokens: read from files, known by their hash, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.refusal import RefusedError
from slipstream.roles import Role
from slipstream.secret_files import WatchedFiles, read_secret

logger = logging.getLogger(__name__)

MIN_CHARACTERS, MAX_CHARACTERS = 32, 1024
_MAX_TOKENS = 256
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
_MAKE_ONE = "make one with: openssl rand -hex 32"


def read_tokens(path: Path, field: str) -> tuple[bytes, ...]:
    """The tokens in a file, one a line; empty lines and those that begin with # are left out.

    Raises:
        RefusedError: the file cannot be read, is everybody's, or a line is no token. The text
            names the line and nothing of what is in it.
    """
    lines = [line.strip() for line in read_secret(path, field).splitlines()]
    tokens = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith(b"#")]
    for number, token in tokens:
        where = f"{path} line {number}"
        if not _TOKEN.fullmatch(token):
            raise RefusedError(
                field, f"{where}, with other characters", "letters, digits, ._~+/-", _MAKE_ONE
            )
        if not MIN_CHARACTERS <= len(token) <= MAX_CHARACTERS:
            raise RefusedError(
                field,
                f"{where}, of {len(token)} characters",
                f"{MIN_CHARACTERS} to {MAX_CHARACTERS}: a short token can be guessed",
                _MAKE_ONE,
            )
    if len(tokens) > _MAX_TOKENS:
        raise RefusedError(
            field, f"{path} with {len(tokens)} tokens", f"at most {_MAX_TOKENS}", "remove old ones"
        )
    return tuple(token for _, token in tokens)


class TokenFiles:
    """Which roles a token opens. Thread-safe; only hashes of the tokens are kept.

    What is in the files at this instant is what counts: a token is revoked by removing its line, or
    the file. A file that went bad opens nothing until it is mended.

    Args:
        files: the files of each role; a token may be in several.
        field: what a file is called in refusals, with the role in place of ``{role}``.

    Raises:
        RefusedError: a file cannot be used, or holds no token.
    """

    def __init__(self, files: Mapping[Role, Sequence[Path]], field: str) -> None:
        self._lock = threading.Lock()
        self._files = [
            _TokenFile(role, path, field.format(role=role))
            for role, paths in files.items()
            for path in paths
        ]

    def __bool__(self) -> bool:
        return bool(self._files)

    def roles_of(self, token: bytes) -> frozenset[Role]:
        """The roles in whose files ``token`` is. Takes as long for every token of a length."""
        presented = hashlib.sha256(token).digest()
        found: set[Role] = set()
        with self._lock:
            for file in self._files:
                for digest in file.digests():
                    if hmac.compare_digest(digest, presented):
                        found.add(file.role)
        return frozenset(found)


class _TokenFile:
    def __init__(self, role: Role, path: Path, field: str) -> None:
        self.role = role
        self._path = path
        self._field = field
        self._watched = WatchedFiles([path])
        self._watched.changed()
        self._digests = self._read()
        if not self._digests:
            raise RefusedError(field, f"{path} without a token", "a token a line", _MAKE_ONE)

    def digests(self) -> tuple[bytes, ...]:
        if self._watched.changed():
            try:
                self._digests = self._read()
                logger.info("%s: %s was read again", self._field, self._path)
            except RefusedError as error:
                self._digests = ()
                logger.error("%s. Its tokens are refused until then", error)
        return self._digests

    def _read(self) -> tuple[bytes, ...]:
        return tuple(
            hashlib.sha256(token).digest() for token in read_tokens(self._path, self._field)
        )
