"""A process's certificate and key: checked before they are used, read again when they change.

Bearer tokens: read from files, known by their hash, compared in constant time.

Files with secrets and certificates: readable by whom they concern, and read again on change.

Who may call what: every method of both services has exactly one role.

Kept with the wire because both servers enforce it and a client must be able to look it up.
``tests/security/test_roles.py`` fails when a method is added to a service and not to this table.

Whether a call may be made, by its token or by its caller's certificate.

Where a server may listen: on loopback, or wherever callers are asked who they are over TLS.

What a client shows to a server, and how it knows that server: files, never their content.

Puts ``Access`` in front of every method of a gRPC server, synchronous or asyncio.

A call that is refused costs little: its requests are not read. Every shape of method can be
answered by a handler of streams, and only such a one need not wait for a request.

A gRPC channel that shows credentials, and follows them when their files change.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import ipaddress
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import grpc

from slipstream.errors import RefusedError, StatusCode, abort_with, trailing_metadata_of

_OTHERS = 0o007
_Stamp = tuple[tuple[int, int, int, int] | None, ...]


class WatchedFiles:
    """Whether any of several files is another than when it was last asked.

    Asked at every use instead of by a thread: a look is a few microseconds, and a rotation is seen
    by the first call after it. Links are followed, as Kubernetes swaps a secret's.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: _Stamp | None = None

    def changed(self) -> bool:
        """Whether to read the files (again); True the first time."""
        stamp = tuple(_stamp(path) for path in self._paths)
        changed = stamp != self._seen
        # Before the files are read: what changes meanwhile is seen next time.
        self._seen = stamp
        return changed


def read_secret(path: Path, field: str) -> bytes:
    """A file that only its owner and group may read.

    Raises:
        RefusedError: it is missing or everybody may read it; never with its content.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                raise RefusedError(
                    field,
                    f"{path}, which everybody on this machine may read",
                    "a secret's file, for its owner and group alone",
                    f"chmod o= {path} (in Kubernetes: defaultMode: 0440 on the secret's volume), "
                    "and replace the secret if others use this machine",
                )
            return file.read()
    except OSError as error:
        raise unreadable(path, field, error) from error


def read_public(path: Path, field: str) -> bytes:
    """A certificate's file. Raises RefusedError: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, field, error) from error


def unreadable(path: Path, field: str, error: OSError) -> RefusedError:
    """What is raised for a file that is not there or not ours."""
    return RefusedError(
        field,
        f"{path} ({error.strerror or error})",
        "a file that this process can read",
        "check the path, and the file's owner and mode",
    )


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsPaths:
    """PEM files.

    Attributes:
        certificate: the certificate, then those between it and its CA, if any.
        key: its private key, not encrypted.
        ca: of those who call, or are called; None where their certificates are not asked for.
    """

    certificate: Path
    key: Path
    ca: Path | None = None


@dataclass(frozen=True)
class FieldNames:
    """What the three files are called in refusals."""

    certificate: str
    key: str
    ca: str


@dataclass(frozen=True, repr=False)
class Pem:
    """What was in the files; not for any log."""

    certificate: bytes
    key: bytes
    ca: bytes | None


class TlsFiles:
    """A server's certificate. Thread-safe.

    New files are used from the next connection on. Where they cannot be, the old ones stay and the
    log says why: a bad rotation must not take a running service down.

    Args:
        paths: with ``ca``, every client must have a certificate of it.
        names: for refusals.

    Raises:
        RefusedError: a file is missing, the key is everybody's or another certificate's, or the
            certificate has expired, is not valid yet or not a server's.
    """

    def __init__(self, paths: TlsPaths, names: FieldNames) -> None:
        self.paths = paths
        self._names = names
        self._lock = threading.Lock()
        self._watched = WatchedFiles(_given(paths))
        self._watched.changed()
        self._pem, self._context = self._load()
        self._generation = 0

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For ``add_secure_port``; later changes of the files are followed."""
        served = self._current()[0]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            generation, pem, _ = self._current()
            if generation == served:
                return None
            served = generation
            return _configuration(pem)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._current()[1]),
            fetch,
            require_client_authentication=self.paths.ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """For one connection to an HTTP server."""
        return self._current()[2]

    def _current(self) -> tuple[int, Pem, ssl.SSLContext]:
        with self._lock:
            if self._watched.changed():
                try:
                    self._pem, self._context = self._load()
                    self._generation += 1
                    logger.info("%s: %s was read again", *self._told())
                except RefusedError as error:
                    logger.error("%s. The certificate before it is used until then", error)
            return self._generation, self._pem, self._context

    def _told(self) -> tuple[str, Path]:
        return self._names.certificate, self.paths.certificate

    def _load(self) -> tuple[Pem, ssl.SSLContext]:
        pem = read_pem(self.paths, self._names)
        check_pair(self.paths, self._names, server=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.paths.certificate, self.paths.key, _no_password)
        if self.paths.ca is not None:
            context.load_verify_locations(self.paths.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return pem, context


def read_pem(paths: TlsPaths, names: FieldNames) -> Pem:
    """The files' content.

    Raises:
        RefusedError: one is missing, everybody may read the key, or ``ca`` holds no certificate.
    """
    if paths.ca is not None:
        check_ca(paths.ca, names.ca)
    return Pem(
        read_public(paths.certificate, names.certificate),
        read_secret(paths.key, names.key),
        None if paths.ca is None else read_public(paths.ca, names.ca),
    )


def check_ca(path: Path, field: str) -> None:
    """Raise RefusedError where a file holds no certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise RefusedError(
            field, f"{path} ({_reason(error)})", "certificates as PEM", "give the CA's certificate"
        ) from error
    except OSError as error:
        raise unreadable(path, field, error) from error


def check_pair(paths: TlsPaths, names: FieldNames, *, server: bool) -> None:
    """Whether a certificate can be used now, found by a handshake of it with itself in memory.

    gRPC takes an expired certificate, or one with another's key, and fails at every connection.

    Args:
        paths: of the pair.
        names: for the refusal.
        server: whether it is to be a server's, or a client's.

    Raises:
        RefusedError: naming the file and what is wrong.
    """
    ends = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    ends[0].check_hostname = False
    ends[0].verify_mode = ssl.CERT_NONE
    try:
        for end in ends:
            end.load_cert_chain(paths.certificate, paths.key, _no_password)
    except ssl.SSLError as error:
        raise RefusedError(
            names.key,
            f"{paths.key} with {paths.certificate} ({_reason(error)})",
            "a certificate and its own private key, as PEM and not encrypted",
            "give the two files that were made together",
        ) from error
    except OSError as error:
        raise unreadable(paths.certificate, names.certificate, error) from error
    judge = ends[0] if server else ends[1]
    judge.verify_mode = ssl.CERT_REQUIRED
    # It vouches for itself: who signed it is for the other side to judge.
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    judge.load_verify_locations(paths.certificate)
    try:
        _shake_hands(*ends)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            names.certificate,
            f"{paths.certificate} ({error.verify_message})",
            f"a certificate for a {'server' if server else 'client'}, valid now",
            "look at its dates with: openssl x509 -noout -dates -purpose -in FILE; then renew it",
        ) from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    # Each turn carries a flight across; TLS 1.3 needs two of each side.
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        ((pem.key, pem.certificate),), root_certificates=pem.ca
    )


def _given(paths: TlsPaths) -> list[Path]:
    return [paths.certificate, paths.key, *([paths.ca] if paths.ca is not None else [])]


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def _no_password() -> str:
    # Without it OpenSSL would ask for an encrypted key's on the terminal.
    return ""


class Role(StrEnum):
    """What a token or a certificate opens."""

    FEED = "feed"
    OBSERVE = "observe"
    OPERATE = "operate"


GRANTS: Mapping[Role, frozenset[Role]] = {
    # Whoever feeds or operates asks for states on the way; the two know nothing of each other.
    Role.FEED: frozenset({Role.FEED, Role.OBSERVE}),
    Role.OBSERVE: frozenset({Role.OBSERVE}),
    Role.OPERATE: frozenset({Role.OPERATE, Role.OBSERVE}),
}
"""What the holder of a role may do: calls of these roles."""

_TRAINER: Mapping[str, Role] = {
    "OpenRun": Role.FEED,
    "StreamStates": Role.FEED,
    "AnnouncePolicy": Role.FEED,
    "PrepareSync": Role.FEED,
    "CompleteSync": Role.FEED,
    "ListReleases": Role.OBSERVE,
    "FetchRelease": Role.OBSERVE,
    "GetStatus": Role.OBSERVE,
    "WatchStatus": Role.OBSERVE,
    "ListVerdicts": Role.OBSERVE,
    "GetHistory": Role.OBSERVE,
    "WatchEvents": Role.OBSERVE,
    "PromoteRelease": Role.OPERATE,
    "RollBackRelease": Role.OPERATE,
    "PinRelease": Role.OPERATE,
    "ImportRelease": Role.OPERATE,
}
_ROLLOUT: Mapping[str, Role] = {
    "Stage": Role.OPERATE,
    "Commit": Role.OPERATE,
    "Abort": Role.OPERATE,
    "RollBack": Role.OPERATE,
    "SetSpeculation": Role.OPERATE,
    "GetState": Role.OBSERVE,
    "WatchAcceptance": Role.OBSERVE,
}

METHODS: Mapping[str, Role | None] = {
    **{f"/slipstream.v1.DraftTrainer/{name}": role for name, role in _TRAINER.items()},
    **{f"/slipstream.v1.RolloutServer/{name}": role for name, role in _ROLLOUT.items()},
    # Probes have no credentials, and what they learn is whether a port serves.
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.OBSERVE,
}
"""Role by full method name; None is open to everybody. What is not here is open to nobody."""


def roles_granted(roles: frozenset[Role]) -> frozenset[Role]:
    """Every role whose calls the holder of ``roles`` may make."""
    return frozenset(granted for role in roles for granted in GRANTS[role])


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


ANY_NAME = "*"
"""Stands for every certificate of the CA."""

REASONS = ("no_credentials", "unknown_token", "unknown_certificate", "role", "tls")
"""Why a call was refused; ``tls`` is a handshake with the HTTP server that failed."""

_PERIOD_SECONDS = 60.0
_MAX_PEERS = 1024
_GIVE_ONE = (
    "give a token (draft-trainer: --token-file; PolicyBridge: trainer_credentials or "
    "rollout_credentials; HTTP: Authorization: Bearer) or a client certificate that has the role; "
    "docs/security.md says how"
)


class AccessRefusals:
    """Counts what was refused, and logs each peer once a minute. Thread-safe.

    Args:
        count: told every reason too, for metrics kept elsewhere.
    """

    def __init__(self, count: Callable[[str], None] = lambda reason: None) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: OrderedDict[str, float] = OrderedDict()

    def counts(self) -> dict[str, int]:
        """Refusals since the start, by reason (``REASONS``)."""
        with self._lock:
            return dict(self._counts)

    def add(self, reason: str, peer: str, what: str) -> None:
        """One more.

        Args:
            reason: of ``REASONS``.
            peer: as gRPC or the socket names it, with the port last.
            what: was asked for, and why not.
        """
        host, now = peer.rpartition(":")[0] or peer, time.monotonic()
        with self._lock:
            self._counts[reason] += 1
            due = now - self._logged.get(host, -_PERIOD_SECONDS) >= _PERIOD_SECONDS
            if due:
                self._logged[host] = now
                self._logged.move_to_end(host)
                if len(self._logged) > _MAX_PEERS:
                    self._logged.popitem(last=False)
        self._count(reason)
        if due:
            logger.warning("refused %s: %s (of this host no more for a minute)", peer, what)


@dataclass(frozen=True)
class Refused:
    """A call that may not be made: why, and what its caller is told."""

    reason: str
    error: RefusedError


class Access:
    """What a server asks of its callers. Thread-safe.

    Args:
        tls: its certificate; None for plain text.
        tokens: which roles they open.
        names: for each role, names of client certificates that open it, or ``ANY_NAME``.
        refusals: where they are counted and logged.
    """

    def __init__(
        self,
        tls: TlsFiles | None,
        tokens: TokenFiles,
        names: Mapping[Role, Collection[str]],
        refusals: AccessRefusals | None = None,
    ) -> None:
        self.tls = tls
        self.refusals = refusals or AccessRefusals()
        self._tokens = tokens
        self._names = {role: frozenset(some) for role, some in names.items() if some}

    @property
    def anonymous(self) -> bool:
        """Whether everybody may do everything."""
        return not self._tokens and not self._names

    @property
    def by_certificate(self) -> bool:
        """Whether a client's certificate may open something."""
        return bool(self._names)

    def judge(
        self, role: Role | None, authorization: str | None, names: Collection[str] = ()
    ) -> Refused | None:
        """None if a call that needs ``role`` may be made.

        Args:
            role: None: nobody may.
            authorization: the header's value, if there was one.
            names: in the client's verified certificate.
        """
        if self.anonymous and role is not None:
            return None
        token = bearer(authorization)
        held = self._tokens.roles_of(token) if token is not None else frozenset[Role]()
        held |= {r for r, some in self._names.items() if names and (some & {ANY_NAME, *names})}
        if role is not None and role in roles_granted(held):
            return None
        needed = "nobody's" if role is None else role
        if held:
            found = f"credentials of the role {' and '.join(sorted(held))}"
            return self._refused("role", found, needed, StatusCode.PERMISSION_DENIED)
        if authorization is not None:
            return self._refused("unknown_token", "a token that opens nothing here", needed)
        if names:
            found = "a certificate whose names open nothing here"
            return self._refused("unknown_certificate", found, needed)
        return self._refused("no_credentials", "no token", needed)

    @staticmethod
    def _refused(
        reason: str, found: str, needed: str, code: StatusCode = StatusCode.UNAUTHENTICATED
    ) -> Refused:
        return Refused(
            reason,
            RefusedError("authorization", found, f"the role {needed}", _GIVE_ONE, code),
        )


def bearer(authorization: str | None) -> bytes | None:
    """The token in an Authorization header; None where there is none that could be one."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_CHARACTERS:
        return None
    return token.strip().encode("utf-8", "replace")


def open_to_all() -> Access:
    """Asks nothing of anybody: for loopback."""
    return Access(None, TokenFiles({}, ""), {})


@dataclass(frozen=True)
class Allowed:
    """What was allowed in plain words, and what the words are called.

    Attributes:
        plaintext: listen on the network without TLS.
        anonymous: listen on the network without asking who calls.
        host_key: option of the address.
        certificate_key: option of the certificate.
        tokens_key: option of the tokens.
        plaintext_key: option of the first.
        anonymous_key: option of the second.
    """

    plaintext: bool
    anonymous: bool
    host_key: str
    certificate_key: str
    tokens_key: str
    plaintext_key: str
    anonymous_key: str


def check_exposure(host: str, access: Access, allowed: Allowed) -> None:
    """Refuse to listen where others could read along, or do as they like.

    Args:
        host: the address to listen on.
        access: what callers are asked for.
        allowed: exceptions.

    Raises:
        RefusedError: ``host`` is not loopback, and there is no TLS or nothing is asked of callers.
    """
    if is_loopback(host):
        return
    if access.tls is None and not allowed.plaintext:
        raise RefusedError(
            allowed.host_key,
            f"{host} without TLS",
            "127.0.0.1, or a certificate",
            f"set {allowed.certificate_key}, or say {allowed.plaintext_key} where every machine "
            "that reaches this port is trusted: states, weights and tokens then cross it readable",
        )
    if access.anonymous and not allowed.anonymous:
        raise RefusedError(
            allowed.host_key,
            f"{host} without tokens or certificate names",
            "127.0.0.1, or callers that show who they are",
            f"set {allowed.tokens_key}, or say {allowed.anonymous_key} where everybody who reaches "
            "this port may replace weights",
        )


def is_loopback(host: str) -> bool:
    """Whether an address, or every address of a name, stays on this machine."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return False
    addresses = {str(entry[4][0]).partition("%")[0] for entry in found}
    return bool(addresses) and all(ipaddress.ip_address(a).is_loopback for a in addresses)


@dataclass(frozen=True)
class ClientCredentials:
    """Settings of one connection. All empty: plain text and no token, as on loopback.

    Attributes:
        ca: PEM of the CA that signed the server's certificate; turns TLS on.
        certificate: this client's own, for servers that ask for one.
        key: its private key.
        token_file: file whose first token is sent with every call.
        server_name: name in the server's certificate, where it is not that of the address.
        allow_plaintext: send the token without TLS over the network.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    server_name: str = ""
    allow_plaintext: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return self.ca is None and self.token_file is None

    def check(self, prefix: str) -> None:
        """Check all files. Call it at the start.

        Args:
            prefix: of the fields' names in refusals, such as ``credentials.``.

        Raises:
            RefusedError: a file cannot be used, or one is given without what it needs.
        """
        for name, given, needs, other in (
            ("certificate", self.certificate, "key", self.key),
            ("key", self.key, "certificate", self.certificate),
            ("certificate", self.certificate, "ca", self.ca),
            ("server_name", self.server_name or None, "ca", self.ca),
        ):
            if given is not None and other is None:
                missing = _named(prefix, needs)
                raise RefusedError(
                    _named(prefix, name), f"{given} without {missing}", "both", f"set {missing}"
                )
        Shown(self, prefix)

    def check_address(self, address: str, field: str) -> None:
        """Refuse an address to which the token would go readable.

        Args:
            address: ``host:port``.
            field: the option that named it.

        Raises:
            RefusedError: a token, no TLS, and not loopback.
        """
        if self.token_file is None or self.ca is not None or self.allow_plaintext:
            return
        # A name that is looked up again and again may be anybody's next time.
        local = address.startswith("unix:") or is_loopback(address.rpartition(":")[0])
        if local and not address.startswith("dns:"):
            return
        raise RefusedError(
            field,
            f"{address} with a token and without TLS",
            "loopback, or a ca to know the server by",
            "give the CA of the server's certificate, or allow plain text where every machine "
            "between the two is trusted: the token crosses it readable",
        )


class Shown:
    """The files' content as of now. Thread-safe.

    Where files changed and cannot be used, the content before stays, and the log says why.

    Args:
        credentials: checked (``ClientCredentials.check``).
        prefix: of the fields' names in refusals.

    Raises:
        RefusedError: a file cannot be used.
    """

    def __init__(self, credentials: ClientCredentials, prefix: str = "") -> None:
        self._credentials = credentials
        self._names = FieldNames(prefix + "certificate", prefix + "key", prefix + "ca")
        self._token_field = _named(prefix, "token_file")
        self._lock = threading.Lock()
        one = credentials
        files = [path for path in (one.ca, one.certificate, one.key) if path is not None]
        self._tls_watched = WatchedFiles(files)
        self._token_watched = WatchedFiles([one.token_file] if one.token_file else [])
        self._tls_watched.changed()
        self._token_watched.changed()
        self._generation = 0
        self._tls = self._read_tls()
        self._token = self._read_token()

    def token(self) -> str | None:
        """To be sent; None where there is none to send."""
        with self._lock:
            if self._token_watched.changed():
                try:
                    self._token = self._read_token()
                except RefusedError as error:
                    logger.error("%s. The token before it is sent until then", error)
            return self._token

    def tls(self) -> tuple[int, grpc.ChannelCredentials | None]:
        """What to connect with, and a number that changes with it."""
        with self._lock:
            if self._tls_watched.changed():
                try:
                    self._tls = self._read_tls()
                    self._generation += 1
                except RefusedError as error:
                    logger.error("%s. The certificates before are used until then", error)
            return self._generation, self._tls

    def _read_tls(self) -> grpc.ChannelCredentials | None:
        one = self._credentials
        if one.ca is None:
            return None
        if one.certificate is None or one.key is None:
            check_ca(one.ca, self._names.ca)
            return grpc.ssl_channel_credentials(read_public(one.ca, self._names.ca))
        paths = TlsPaths(one.certificate, one.key, one.ca)
        pem = read_pem(paths, self._names)
        check_pair(paths, self._names, server=False)
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)

    def _read_token(self) -> str | None:
        path = self._credentials.token_file
        if path is None:
            return None
        tokens = read_tokens(path, self._token_field)
        if not tokens:
            raise RefusedError(
                self._token_field, f"{path} without a token", "a token", "write the token there"
            )
        return tokens[0].decode("ascii")


def _named(prefix: str, name: str) -> str:
    return prefix + (name.replace("_", "-") if prefix == "--" else name)


NONE = ClientCredentials()
"""Plain text, no token."""


_AUTHORIZATION = "authorization"
_Handler: TypeAlias = grpc.RpcMethodHandler


class AccessInterceptor(grpc.ServerInterceptor):
    """For ``grpc.server``, before every other. Install it unless ``access.anonymous``.

    Args:
        access: decides.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """gRPC's hook."""
        handler, call = continuation(details), _Call(self._access, details)
        if handler is None or call.admitted():
            return handler

        def admit(context: grpc.ServicerContext) -> None:
            error = call.refusal(context)
            if error is not None:
                abort_with(error, context)

        def refuse(requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            admit(context)
            yield from ()

        if not self._access.by_certificate:
            return grpc.stream_stream_rpc_method_handler(refuse)
        behavior = _behavior(handler)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            admit(context)
            return behavior(request, context)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            admit(context)
            yield from behavior(request, context)

        return _with_behavior(handler, stream if handler.response_streaming else answer)


class AioAccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The same for ``grpc.aio.server``.

    Args:
        access: decides.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """gRPC's hook."""
        handler, call = await continuation(details), _Call(self._access, details)
        if handler is None or call.admitted():
            return handler

        async def admit(context: Any) -> None:
            error = call.refusal(context)
            if error is not None:
                await context.abort(error.code, error.for_wire(), trailing_metadata_of(error))

        async def refuse(requests: Any, context: Any) -> None:
            await admit(context)

        if not self._access.by_certificate:
            return grpc.stream_stream_rpc_method_handler(refuse)
        behavior = _behavior(handler)

        async def answer(request: Any, context: Any) -> Any:
            await admit(context)
            return await behavior(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await admit(context)
            async for response in behavior(request, context):
                yield response

        # Some handlers of streams write their answers themselves.
        yields = inspect.isasyncgenfunction(behavior)
        return _with_behavior(handler, stream if yields else answer)


class _Call:
    """One call, judged by its token first and by its caller's certificate when it begins."""

    def __init__(self, access: Access, details: grpc.HandlerCallDetails) -> None:
        self._access = access
        self._open = details.method in METHODS and METHODS[details.method] is None
        self._role = METHODS.get(details.method)
        found = [value for key, value in details.invocation_metadata or () if key == _AUTHORIZATION]
        # Of several, whoever added the second is not to be trusted with the first.
        self._authorization = found[0] if len(found) == 1 else (" " if found else None)

    def admitted(self) -> bool:
        """Whether no certificate is needed."""
        return self._open or self._access.judge(self._role, self._authorization) is None

    def refusal(self, context: Any) -> RefusedError | None:
        """Why the call may not be made, counted and logged; None where a certificate opens it."""
        names = certificate_names(context.auth_context())
        refused = self._access.judge(self._role, self._authorization, names)
        if refused is None:
            return None
        self._access.refusals.add(refused.reason, context.peer(), str(refused.error))
        return refused.error


def certificate_names(auth_context: Mapping[str, Sequence[bytes]]) -> frozenset[str]:
    """The names in a verified client certificate: its alternative names, else its common name."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        found = frozenset(value.decode("utf-8", "replace") for value in auth_context.get(key, ()))
        if found:
            return found
    return frozenset()


def _behavior(handler: _Handler) -> Callable[..., Any]:
    found: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return found


def _with_behavior(handler: _Handler, behavior: Callable[..., Any]) -> _Handler:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(behavior, handler.request_deserializer, handler.response_serializer)


_Metadata = Sequence[tuple[str, str | bytes]]


class CredentialedChannel(grpc.Channel):
    """Connects again with new certificates, and sends the token of this instant with each call.

    gRPC's own channel keeps the certificates it was made with, and would be refused by the first
    server that restarts after theirs have expired. Calls that are under way stay on the connection
    before; it is closed at the change after the next one.

    Args:
        shown: the credentials.
        connect: opens a plain or a secure channel.
    """

    def __init__(
        self, shown: Shown, connect: Callable[[grpc.ChannelCredentials | None], grpc.Channel]
    ) -> None:
        self._shown = shown
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False
        self._generation, tls = shown.tls()
        self._channel = connect(tls)
        self._before: grpc.Channel | None = None

    def now(self) -> grpc.Channel:
        """The connection to use."""
        with self._lock:
            generation, tls = self._shown.tls()
            if generation != self._generation and not self._closed:
                if self._before is not None:
                    self._before.close()
                self._before, self._channel = self._channel, self._connect(tls)
                self._generation = generation
            return self._channel

    def with_token(self, metadata: _Metadata | None) -> _Metadata | None:
        """A call's metadata with the token, if there is one."""
        token = self._shown.token()
        return (
            metadata if token is None else (*(metadata or ()), ("authorization", f"Bearer {token}"))
        )

    def subscribe(self, callback: Callable[[Any], None], try_to_connect: bool = False) -> None:
        """gRPC's; of the connection of this instant."""
        self.now().subscribe(callback, try_to_connect=try_to_connect)

    def unsubscribe(self, callback: Callable[[Any], None]) -> None:
        """gRPC's."""
        self.now().unsubscribe(callback)

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> _CredentialedCall:
        """gRPC's."""
        return _CredentialedCall(
            self, lambda channel: channel.unary_unary(method, *arguments, **options)
        )

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> _CredentialedCall:
        """gRPC's."""
        return _CredentialedCall(
            self, lambda channel: channel.unary_stream(method, *arguments, **options)
        )

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> _CredentialedCall:
        """gRPC's."""
        return _CredentialedCall(
            self, lambda channel: channel.stream_unary(method, *arguments, **options)
        )

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> _CredentialedCall:
        """gRPC's."""
        return _CredentialedCall(
            self, lambda channel: channel.stream_stream(method, *arguments, **options)
        )

    def close(self) -> None:
        """Close every connection; calls under way fail."""
        with self._lock:
            self._closed = True
            if self._before is not None:
                self._before.close()
            self._channel.close()

    def __enter__(self) -> CredentialedChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _CredentialedCall:
    """One method, whichever of the four shapes it has."""

    def __init__(self, owner: CredentialedChannel, build: Callable[[grpc.Channel], Any]) -> None:
        self._owner = owner
        self._build = build
        self._built: tuple[grpc.Channel, Any] | None = None

    def __call__(
        self, request: Any, timeout: Any = None, metadata: Any = None, **options: Any
    ) -> Any:
        return self._now()(
            request, timeout=timeout, metadata=self._owner.with_token(metadata), **options
        )

    def with_call(
        self, request: Any, timeout: Any = None, metadata: Any = None, **options: Any
    ) -> Any:
        return self._now().with_call(
            request, timeout=timeout, metadata=self._owner.with_token(metadata), **options
        )

    def future(
        self, request: Any, timeout: Any = None, metadata: Any = None, **options: Any
    ) -> Any:
        return self._now().future(
            request, timeout=timeout, metadata=self._owner.with_token(metadata), **options
        )

    def _now(self) -> Any:
        channel, built = self._owner.now(), self._built
        if built is None or built[0] is not channel:
            built = self._built = (channel, self._build(channel))
        return built[1]
