"""Where a server may listen: on loopback, or wherever callers are asked who they are over TLS."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from slipstream.access import Access
from slipstream.refusal import RefusedError


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
