"""What a client shows to a server, and how it knows that server: files, never their content."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from slipstream.exposure import is_loopback
from slipstream.refusal import RefusedError
from slipstream.secret_files import WatchedFiles, read_public
from slipstream.tls import FieldNames, TlsPaths, check_ca, check_pair, read_pem
from slipstream.tokens import read_tokens

logger = logging.getLogger(__name__)


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
