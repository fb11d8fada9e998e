"""Authorization of callers: roles, tokens and client certificates, and client credentials.

A server listens beyond loopback only with TLS and with callers that show who they are, unless its
configuration allows otherwise in plain words. docs/security.md says how to set it up and what it
protects from.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import grpc

from slipstream.errors import Refusals, RefusedError, StatusCode
from slipstream.serving.tls import Followed, OptionName, TlsFiles, TlsPaths, read_ca, read_file


class Role(StrEnum):
    """A role that a token or a certificate gives its holder."""

    FEED = "feed"
    OBSERVE = "observe"
    OPERATE = "operate"


GRANTS: Mapping[Role, frozenset[Role]] = {
    # Feeding and operating need to observe; neither includes the other.
    Role.FEED: frozenset({Role.FEED, Role.OBSERVE}),
    Role.OBSERVE: frozenset({Role.OBSERVE}),
    Role.OPERATE: frozenset({Role.OPERATE, Role.OBSERVE}),
}
"""The roles whose calls the holder of a role may make."""


def _methods(service: str, **names: str) -> dict[str, Role]:
    return {
        f"/slipstream.v1.{service}/{name}": Role(role)
        for role, some in names.items()
        for name in some.split()
    }


METHODS: Mapping[str, Role | None] = {
    **_methods(
        "DraftTrainer",
        feed="OpenRun StreamStates AnnouncePolicy PrepareSync CompleteSync",
        observe="ListReleases FetchRelease GetStatus GetHistory WatchEvents",
        operate="PromoteRelease RollBackRelease ImportRelease",
    ),
    **_methods(
        "RolloutServer",
        observe="GetState WatchAcceptance",
        operate="Stage Commit Abort RollBack SetSpeculation",
    ),
    # Probes have no credentials, and learn no more than whether a port serves.
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.OBSERVE,
}
"""The role of each method by its full name; None: open to all. Others are open to nobody."""


def roles_granted(roles: frozenset[Role]) -> frozenset[Role]:
    """Every role whose calls the holder of ``roles`` may make."""
    return frozenset(granted for role in roles for granted in GRANTS[role])


MIN_CHARACTERS, MAX_CHARACTERS = 32, 1024
_MAX_TOKENS = 256
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
_MAKE_ONE = "make one with: openssl rand -hex 32"


def read_tokens(path: Path, field: str) -> tuple[bytes, ...]:
    """Read the tokens in a file, one a line; empty lines and those that begin with # are skipped.

    Raises:
        RefusedError: the file cannot be read, everybody may read it, or a line is no token. The
            text gives the line's number and nothing of its content.
    """
    lines = [line.strip() for line in read_file(path, field, secret=True).splitlines()]
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
    """The roles of tokens, by the files that list them. Thread-safe; keeps only hashes of tokens.

    The files' present content counts: a token is revoked by removing its line, or the file. A file
    that cannot be used gives no role until it is mended.

    Raises:
        RefusedError: a file cannot be used, or holds no token.
    """

    def __init__(self, files: Mapping[Role, Sequence[Path]], field: str) -> None:
        self._digests = [
            (role, _digests_in(path, field.format(role=role)))
            for role, paths in files.items()
            for path in paths
        ]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def roles_of(self, token: bytes) -> frozenset[Role]:
        """The roles in whose files ``token`` is, found in equal time for all tokens of a length."""
        presented = hashlib.sha256(token).digest()
        found: set[Role] = set()
        for role, digests in self._digests:
            for digest in digests.now():
                if hmac.compare_digest(digest, presented):
                    found.add(role)
        return frozenset(found)


def _digests_in(path: Path, field: str) -> Followed[tuple[bytes, ...]]:
    def read() -> tuple[bytes, ...]:
        return tuple(hashlib.sha256(token).digest() for token in read_tokens(path, field))

    digests: Followed[tuple[bytes, ...]] = Followed([path], read, when_bad=())
    if not digests.now():
        raise RefusedError(field, f"{path} without a token", "a token a line", _MAKE_ONE)
    return digests


ANY_NAME = "*"
"""The name that stands for every certificate of the CA."""

REASONS = ("no_credentials", "unknown_token", "unknown_certificate", "role", "tls")
"""The reasons for refusing a call; ``tls`` is a failed handshake with the HTTP server."""

_GIVE_ONE = (
    "give a token (draft-trainer: --token-file; PolicyBridge: trainer_credentials or "
    "rollout_credentials; HTTP: Authorization: Bearer) or a client certificate that has the role; "
    "docs/security.md says how"
)


class Denied(NamedTuple):
    """The denial of a call: its reason (one of ``REASONS``) and the error for its caller."""

    reason: str
    error: RefusedError


class Access:
    """A server's check of its callers, and the count of those refused. Thread-safe."""

    def __init__(
        self, tls: TlsFiles | None, tokens: TokenFiles, names: Mapping[Role, Collection[str]]
    ) -> None:
        self.tls = tls
        self.refusals = Refusals()
        self._tokens = tokens
        self._names = {role: frozenset(some) for role, some in names.items() if some}

    @property
    def anonymous(self) -> bool:
        """True if everybody may do everything."""
        return not self._tokens and not self._names

    @property
    def open(self) -> bool:
        """True if a client needs neither a credential nor a CA."""
        return self.anonymous and self.tls is None

    def judge(
        self,
        role: Role | None,
        authorization: str | None,
        names: Collection[str] = (),
        peer: str = "",
    ) -> Denied | None:
        """Return None if ``peer`` may make a call that needs ``role``; else count and log it."""
        if self.anonymous and role is not None:
            return None
        token = bearer(authorization)
        held = self._tokens.roles_of(token) if token is not None else frozenset[Role]()
        held |= {r for r, some in self._names.items() if names and (some & {ANY_NAME, *names})}
        if role is not None and role in roles_granted(held):
            return None
        code = StatusCode.UNAUTHENTICATED
        if held:
            reason, code = "role", StatusCode.PERMISSION_DENIED
            found = f"credentials of the role {' and '.join(sorted(held))}"
        elif authorization is not None:
            reason, found = "unknown_token", "a token that opens nothing here"
        elif names:
            reason, found = "unknown_certificate", "a certificate whose names open nothing here"
        else:
            reason, found = "no_credentials", "no token"
        expected = "the role nobody's" if role is None else f"the role {role}"
        error = RefusedError("authorization", found, expected, _GIVE_ONE, code)
        self.refusals.denied(reason, peer, str(error))
        return Denied(reason, error)


def bearer(authorization: str | None) -> bytes | None:
    """The token in an Authorization header; None where there is none that could be one."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_CHARACTERS:
        return None
    return token.strip().encode("utf-8", "replace")


def certificate_names(auth_context: Mapping[str, Sequence[bytes]]) -> frozenset[str]:
    """The names in a verified client certificate: its alternative names, else its common name."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        found = frozenset(value.decode("utf-8", "replace") for value in auth_context.get(key, ()))
        if found:
            return found
    return frozenset()


def open_access(
    name: OptionName,
    host: str,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    client_ca: Path | None = None,
    tokens: Mapping[Role, Sequence[Path]],
    names: Mapping[Role, Sequence[str]],
    allow_plaintext: bool = False,
    allow_anonymous: bool = False,
) -> Access:
    """Make the check that a server's configuration asks for, with every file read and checked.

    Args:
        name: from a parameter to the user's name for it.
        host: where the server listens.

    Raises:
        RefusedError: a file cannot be used, an option is given without another that it needs, or
            ``host`` is not loopback and there is no TLS or callers need no credentials.
    """
    named = next((f"{role}_names" for role in Role if names.get(role)), None)
    _check_given_together(
        name,
        ("certificate", certificate, "key", key),
        ("key", key, "certificate", certificate),
        ("client_ca", client_ca, "certificate", certificate),
        (named or "", named, "client_ca", client_ca),
    )
    tls = None
    if certificate is not None and key is not None:
        tls = TlsFiles(TlsPaths(certificate, key, client_ca), name)
    access = Access(tls, TokenFiles(tokens, name("{role}_tokens")), names)
    if is_loopback(host):
        return access
    if tls is None and not allow_plaintext:
        raise RefusedError(
            name("host"),
            f"{host} without TLS",
            "127.0.0.1, or a certificate",
            f"set {name('certificate')} and {name('key')}, or {name('allow_plaintext')} where "
            "every machine that reaches this port is trusted: states, weights and tokens then "
            "cross it readable",
        )
    if access.anonymous and not allow_anonymous:
        raise RefusedError(
            name("host"),
            f"{host} without tokens or certificate names",
            "127.0.0.1, or callers that show who they are",
            f"set {name('operate_tokens')}, or {name('allow_anonymous')} where everybody who "
            "reaches this port may replace weights",
        )
    return access


def _check_given_together(
    name: OptionName, *pairs: tuple[str, object | None, str, object | None]
) -> None:
    for option, given, needed, other in pairs:
        if given is not None and other is None:
            missing = name(needed)
            raise RefusedError(name(option), f"given without {missing}", "both", f"set {missing}")


def is_loopback(host: str) -> bool:
    """Return whether an address, or every address of a name, stays on this machine."""
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
    """The files by which a client identifies itself and knows the server; never their content.

    All empty: plain text and no token, as on loopback. The token's file is read again when it
    changes, certificates are not.

    Attributes:
        ca: PEM of the CA that signed the server's certificate; turns TLS on.
        certificate: PEM of this client's certificate, for servers that require one.
        key: PEM of its private key.
        token_file: file whose first token is sent with every call.
        server_name: name in the server's certificate, if it is not the name in the address.
        allow_plaintext: send the token without TLS over the network.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    server_name: str = ""
    allow_plaintext: bool = False

    def check(self, prefix: str) -> None:
        """Check all files. Call it at the start.

        Raises RefusedError: a file cannot be used, or one is given without what it needs.
        """
        _check_given_together(
            lambda name: _named(prefix, name),
            ("certificate", self.certificate, "key", self.key),
            ("key", self.key, "certificate", self.certificate),
            ("certificate", self.certificate, "ca", self.ca),
            ("server_name", self.server_name or None, "ca", self.ca),
        )
        self.tls(prefix)
        self.token(prefix)

    def check_address(self, address: str, field: str) -> None:
        """Refuse an address to which the token would go readable.

        Raises RefusedError: a token, no TLS, and not loopback.
        """
        if self.token_file is None or self.ca is not None or self.allow_plaintext:
            return
        # A DNS name can be another machine's at the next look-up.
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

    def tls(self, prefix: str = "") -> grpc.ChannelCredentials | None:
        """The channel's credentials; None for plain text. Raises RefusedError: an unusable file."""
        if self.ca is None:
            return None
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(read_ca(self.ca, _named(prefix, "ca")))
        paths = TlsPaths(self.certificate, self.key, self.ca)
        pem = paths.read(lambda name: _named(prefix, name), "ca", server=False)
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)

    def token(self, prefix: str = "") -> Followed[str] | None:
        """The file's first token, reread when that changes; None without a file.

        Raises RefusedError: the file is unusable.
        """
        path, option = self.token_file, _named(prefix, "token_file")
        if path is None:
            return None

        def read() -> str:
            tokens = read_tokens(path, option)
            if not tokens:
                raise RefusedError(
                    option, f"{path} without a token", "a token", "write the token there"
                )
            return tokens[0].decode("ascii")

        return Followed([path], read)


def _named(prefix: str, name: str) -> str:
    return prefix + (name.replace("_", "-") if prefix.startswith("--") else name)


NONE = ClientCredentials()
"""Plain text, no token."""
