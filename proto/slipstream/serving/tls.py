"""Certificate, key and secret files: checked before use, reread when they change."""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import grpc

from slipstream.errors import RefusedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20
"""The most bytes of a token or certificate file."""

_OTHERS = 0o007


def read_file(path: Path, field: str, *, secret: bool) -> bytes:
    """Read a file of a certificate, a key or tokens.

    Args:
        path: a regular file; a FIFO, a device or a directory is refused at once.
        field: the option that names it, for the refusal.
        secret: refuse it unless only its owner and group may read it.

    Raises:
        RefusedError: the file cannot be used; never with its content.
    """
    try:
        # Non-blocking: otherwise opening a FIFO that no process writes to would wait.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                kind = "Is a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise _unusable(path, field, kind)
            if secret and mode & _OTHERS:
                found = f"{path}, which everybody on this machine may read"
                next_step = f"chmod o= {path} (Kubernetes: defaultMode: 0440); replace the secret"
                raise RefusedError(field, found, "a file of its owner and group", next_step)
            data = file.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError as error:
        raise _unusable(path, field, "Is a directory") from error
    except OSError as error:
        raise _unusable(path, field, error.strerror or str(error)) from error
    if len(data) > MAX_FILE_BYTES:
        raise _unusable(path, field, f"more than {MAX_FILE_BYTES} bytes")
    return data


def _unusable(path: Path, field: str, why: str) -> RefusedError:
    return RefusedError(
        field, f"{path} ({why})", "a file that this process can read", "check path, owner and mode"
    )


class Followed(Generic[T]):
    """The value that ``read`` makes of some files, made again when one of them changes.

    Thread-safe. Checked at every use instead of by a thread: a stat takes microseconds. Links are
    followed: Kubernetes updates a secret by replacing one. Files that cannot be used are read again
    at every use: the cause may be outside them, such as a slow clock or a lack of descriptors.

    Args:
        paths: of the files.
        read: reads and checks them.
        when_bad: replaces the value while the files cannot be used; None keeps the value before.

    Raises:
        RefusedError: the files cannot be used now.
    """

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], T], when_bad: T | None = None
    ) -> None:
        self._paths = paths
        self._read = read
        self._when_bad = when_bad
        self._lock = threading.Lock()
        self._stamp = [_stamp(path) for path in paths]
        self._logged: object = None
        self._value = read()

    def now(self) -> T:
        """The value; the same object until a file changes."""
        with self._lock:
            # Before reading: a file that changes meanwhile is seen by the next use.
            stamp = [_stamp(path) for path in self._paths]
            if stamp != self._stamp:
                logged, self._logged = self._logged, None
                try:
                    self._value = self._read()
                    self._stamp = stamp
                    logger.info("reread %s", ", ".join(map(str, self._paths)))
                except RefusedError as error:
                    self._stamp, self._logged = [], (stamp, str(error))
                    kept = "The previous contents stay in use until then"
                    if self._when_bad is not None:
                        self._value = self._when_bad
                        kept = "Nothing from it is accepted until then"
                    if logged != self._logged:
                        logger.error("%s. %s", error, kept)
            return self._value


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


OptionName = Callable[[str], str]
"""A function from ``certificate`` to the user's name for it: ``access.certificate``,
``--certificate``."""


class TlsPaths(NamedTuple):
    """The paths of PEM files."""

    certificate: Path
    key: Path
    ca: Path | None = None

    def read(self, name: OptionName, ca_name: str, *, server: bool) -> Pem:
        """Read and check their content. Raises RefusedError."""
        ca = None if self.ca is None else read_ca(self.ca, name(ca_name))
        certificate = read_file(self.certificate, name("certificate"), secret=False)
        key = read_file(self.key, name("key"), secret=True)
        _check_pair(self, name, server=server)
        return Pem(certificate, key, ca)


@dataclass(frozen=True, eq=False, repr=False)
class Pem:
    """The content of the files; never to be logged."""

    certificate: bytes
    key: bytes
    ca: bytes | None


class TlsFiles:
    """A server's certificate. Thread-safe.

    New files are used from the next connection on. Where they cannot be used the old ones stay and
    the log says why: a bad rotation does not take a running service down.

    Raises:
        RefusedError: a file is missing, the key is everybody's or another certificate's, or the
            certificate has expired, is not valid yet or not a server's.
    """

    def __init__(self, paths: TlsPaths, name: OptionName) -> None:
        def read() -> tuple[Pem, ssl.SSLContext]:
            pem = paths.read(name, "client_ca", server=True)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(paths.certificate, paths.key, _no_password)
            if pem.ca is not None:
                context.load_verify_locations(cadata=pem.ca.decode("ascii", "replace"))
                context.verify_mode = ssl.CERT_REQUIRED
            return pem, context

        self._pem = Followed([path for path in paths if path is not None], read)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The credentials for ``add_secure_port``; later changes of the files are followed."""
        served, _ = self._pem.now()

        def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
            pairs = ((pem.key, pem.certificate),)
            return grpc.ssl_server_certificate_configuration(pairs, root_certificates=pem.ca)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            before, (served, _) = served, self._pem.now()
            return None if served is before else configuration(served)

        return grpc.dynamic_ssl_server_credentials(
            configuration(served), fetch, require_client_authentication=served.ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """The context for one connection to an HTTP server."""
        return self._pem.now()[1]


def read_ca(path: Path, field: str) -> bytes:
    """Read the certificates of a CA. Raises RefusedError: no file, or no certificates in it."""
    data = read_file(path, field, secret=False)
    try:
        text = data.decode("ascii", "replace")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise RefusedError(
            field, f"{path} ({_reason(error)})", "certificates as PEM", "give the CA's certificate"
        ) from error
    return data


def _check_pair(paths: TlsPaths, name: OptionName, *, server: bool) -> None:
    """Check that a certificate can be used now, by a handshake with itself in memory.

    gRPC takes an expired certificate, or one with another's key, and then fails every connection.

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
        found = f"{paths.key} with {paths.certificate} ({_reason(error)})"
        expected = "a certificate and its own private key, as PEM and not encrypted"
        next_step = "give the two files that were made together"
        raise RefusedError(name("key"), found, expected, next_step) from error
    except OSError as error:
        raise _unusable(paths.certificate, name("certificate"), str(error)) from error
    verifier = ends[0] if server else ends[1]
    verifier.verify_mode = ssl.CERT_REQUIRED
    # The certificate is its own trust anchor; the other side checks who issued it.
    verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    verifier.load_verify_locations(paths.certificate)
    try:
        _shake_hands(*ends)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            name("certificate"),
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


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or str(error)).replace("_", " ").lower()


def _no_password() -> str:
    # Without it OpenSSL asks for an encrypted key's password on the terminal.
    return ""
