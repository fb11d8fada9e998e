"""A process's certificate and key: checked before they are used, read again when they change."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from slipstream.refusal import RefusedError
from slipstream.secret_files import WatchedFiles, read_public, read_secret, unreadable

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
