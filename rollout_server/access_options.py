"""The options of ``rollout-server serve`` that say who may use the control plane."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from slipstream.access import Access, AccessRefusals
from slipstream.exposure import Allowed, check_exposure
from slipstream.refusal import RefusedError
from slipstream.roles import Role
from slipstream.tls import FieldNames, TlsFiles, TlsPaths
from slipstream.tokens import TokenFiles

_ROLES = (Role.OBSERVE, Role.OPERATE)


def add_to(group: Any) -> None:
    """Register the options: files and names, never secrets."""
    for option, what in (
        ("--control-certificate", "PEM of the control plane's certificate; turns TLS on there."),
        ("--control-key", "PEM of its private key."),
        ("--control-client-ca", "PEM of a CA; every client needs a certificate of it."),
    ):
        group.add_argument(option, type=Path, metavar="FILE", help=what)
    group.add_argument(
        "--control-token",
        action="append",
        default=[],
        metavar="ROLE=FILE",
        help="File of tokens that have the role observe or operate. May be given several times.",
    )
    group.add_argument(
        "--control-name",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="Name in client certificates that have the role observe or operate; * for all. May "
        "be given several times.",
    )
    group.add_argument(
        "--control-allow-plaintext",
        action="store_true",
        help="Let the control plane listen on other addresses than loopback without TLS.",
    )
    group.add_argument(
        "--control-allow-anonymous",
        action="store_true",
        help="Let it listen there without asking who calls: whoever reaches it can replace the "
        "weights.",
    )


def access_of(args: argparse.Namespace) -> Access:
    """What callers of the control plane are asked for; everything is read and checked here.

    Raises:
        RefusedError: a file cannot be used, an option is given without what it needs, or the
            control plane would listen on the network without TLS or without asking who calls.
    """
    certificate, key, ca = args.control_certificate, args.control_key, args.control_client_ca
    for option, given, needed, other in (
        ("--control-certificate", certificate, "--control-key", key),
        ("--control-key", key, "--control-certificate", certificate),
        ("--control-client-ca", ca, "--control-certificate", certificate),
        ("--control-name", args.control_name or None, "--control-client-ca", ca),
    ):
        if given is not None and other is None:
            raise RefusedError(option, f"given without {needed}", "both", f"give {needed} too")
    tls = None
    if certificate is not None:
        names = FieldNames("--control-certificate", "--control-key", "--control-client-ca")
        tls = TlsFiles(TlsPaths(certificate, key, ca), names)
    files = _by_role("--control-token", args.control_token)
    access = Access(
        tls,
        TokenFiles(
            {role: [Path(p) for p in some] for role, some in files.items()}, "--control-token"
        ),
        _by_role("--control-name", args.control_name),
        AccessRefusals(),
    )
    check_exposure(
        args.control_host,
        access,
        Allowed(
            args.control_allow_plaintext,
            args.control_allow_anonymous,
            host_key="--control-host",
            certificate_key="--control-certificate and --control-key",
            tokens_key="--control-token operate=FILE",
            plaintext_key="--control-allow-plaintext",
            anonymous_key="--control-allow-anonymous",
        ),
    )
    return access


def _by_role(option: str, given: list[str]) -> dict[Role, list[str]]:
    found: dict[Role, list[str]] = {role: [] for role in _ROLES}
    for text in given:
        role, _, value = text.partition("=")
        if role not in found or not value:
            # Not the text: who mistakes this for the token itself must not find it in a log.
            raise RefusedError(
                option,
                "something else",
                f"ROLE=VALUE with a role of {', '.join(found)}",
                "name the role, then a file or a name; a token itself is never given here",
            )
        found[Role(role)].append(value)
    return found
