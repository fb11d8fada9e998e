"""[access] and [credentials]: whom the trainer lets in, and what it shows to rollout servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import Field

from draft_trainer.config_section import ConfigPath, Section
from slipstream.access import Access, AccessRefusals
from slipstream.credentials import ClientCredentials
from slipstream.exposure import Allowed, check_exposure
from slipstream.refusal import RefusedError
from slipstream.roles import Role
from slipstream.tls import FieldNames, TlsFiles, TlsPaths
from slipstream.tokens import TokenFiles

if TYPE_CHECKING:
    from draft_trainer.config import TrainerConfig

S = TypeVar("S", bound=Section)
Files = Annotated[tuple[ConfigPath, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class AccessConfig(Section):
    """[access]: the server's certificate, and who may call what. Only paths, never secrets."""

    certificate: ConfigPath | None = None
    key: ConfigPath | None = None
    client_ca: ConfigPath | None = None
    feed_tokens: Files = ()
    observe_tokens: Files = ()
    operate_tokens: Files = ()
    feed_names: Names = ()
    observe_names: Names = ()
    operate_names: Names = ()


class CredentialsConfig(Section):
    """[credentials]: what is shown to the rollout servers. Only paths, never secrets."""

    ca: ConfigPath | None = None
    certificate: ConfigPath | None = None
    key: ConfigPath | None = None
    token_file: ConfigPath | None = None
    server_name: str = ""
    allow_plaintext: bool = False


def beneath(base: Path, section: S) -> S:
    """A section with its relative paths below ``base``."""
    changed: dict[str, object] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Path):
            changed[name] = base / value
        elif isinstance(value, tuple) and value and isinstance(value[0], Path):
            changed[name] = tuple(base / path for path in value)
    return section.model_copy(update=changed)


def access_of(config: TrainerConfig, count: Callable[[str], None]) -> Access:
    """What callers are asked for; everything is read and checked here.

    Args:
        config: with absolute paths.
        count: told the reason of every refusal.

    Raises:
        RefusedError: a file cannot be used, a key is given without what it needs, or [server]
            would listen on the network without TLS or without asking who calls.
    """
    section, server = config.access, config.server
    names = {role: getattr(section, f"{role}_names") for role in Role}
    for key, given, needed in (
        ("certificate", section.certificate, "key"),
        ("key", section.key, "certificate"),
        ("client_ca", section.client_ca, "certificate"),
        ("names", any(names.values()) or None, "client_ca"),
    ):
        if given is not None and getattr(section, needed) is None:
            key = next(f"{r}_names" for r in Role if names[r]) if key == "names" else key
            raise RefusedError(
                f"access.{key}",
                f"a value, and access.{needed} without one",
                "both",
                f"set access.{needed}",
            )
    tls = None
    if section.certificate is not None and section.key is not None:
        tls = TlsFiles(
            TlsPaths(section.certificate, section.key, section.client_ca),
            FieldNames("access.certificate", "access.key", "access.client_ca"),
        )
    files = {role: getattr(section, f"{role}_tokens") for role in Role}
    access = Access(tls, TokenFiles(files, "access.{role}_tokens"), names, AccessRefusals(count))
    check_exposure(
        server.host,
        access,
        Allowed(
            server.allow_plaintext,
            server.allow_anonymous,
            host_key="server.host",
            certificate_key="access.certificate and access.key",
            tokens_key="access.feed_tokens, access.observe_tokens and access.operate_tokens",
            plaintext_key="server.allow_plaintext = true",
            anonymous_key="server.allow_anonymous = true",
        ),
    )
    return access


def credentials_of(config: TrainerConfig) -> ClientCredentials:
    """What is shown to the rollout servers, its files checked.

    Raises:
        RefusedError: a file cannot be used, or a token would cross the network readable.
    """
    section = config.credentials
    shown = ClientCredentials(
        section.ca,
        section.certificate,
        section.key,
        section.token_file,
        section.server_name,
        section.allow_plaintext,
    )
    shown.check("credentials.")
    for address in config.publish.rollout_servers:
        # A file's addresses are looked at one by one, when a channel to them is opened.
        if address.startswith("file:"):
            continue
        shown.check_address(address, "publish.rollout_servers")
    return shown
