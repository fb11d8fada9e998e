"""Refusals before anything starts: addresses to listen on, and files."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.config import access_of as trainer_access
from draft_trainer.config import credentials_of
from policy_bridge import BridgeConfig
from rollout_server.vllm.launch import access_of, add_access_options
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.serving.identity import (
    ClientCredentials,
    Role,
    TokenFiles,
    is_loopback,
    read_tokens,
)
from tests.draft_trainer.rig import make_config
from tests.security.certificates import Authority, Pair, write_token

pytestmark = pytest.mark.contract("hostile peers")

TOKEN = "t" * 40


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Pair]:
    authority = Authority(tmp_path_factory.mktemp("pki"))
    return authority, authority.sign("server")


def trainer_refuses(tmp_path: Path, **sections: dict[str, Any]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        trainer_access(make_config(tmp_path, **sections))
    return caught.value


def control_refuses(*options: str, host: str = "127.0.0.1") -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        control_access(*options, host=host)
    return caught.value


def control_access(*options: str, host: str) -> Any:
    parser = argparse.ArgumentParser()
    add_access_options(parser)
    parser.set_defaults(control_host=host)
    return access_of(parser.parse_args(options))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "no.such.host.invalid"])
def test_non_loopback_needs_tls_and_tokens(
    tmp_path: Path, pki: tuple[Authority, Pair], host: str
) -> None:
    _, pair = pki
    token = write_token(tmp_path / "token", TOKEN)
    tls = {"certificate": str(pair.certificate), "key": str(pair.key)}
    tokens = {f"{role}_tokens": [str(token)] for role in Role}

    refusal = trainer_refuses(tmp_path, server={"host": host})
    assert refusal.field == "server.host" and "without TLS" in refusal.found
    assert "server.allow_plaintext = true" in refusal.next_step
    assert "without TLS" in trainer_refuses(tmp_path, server={"host": host}, access=tokens).found
    refusal = trainer_refuses(tmp_path, server={"host": host}, access=tls)
    assert "without tokens" in refusal.found
    assert "server.allow_anonymous = true" in refusal.next_step
    plain = {"host": host, "allow_plaintext": True}
    assert "without tokens" in trainer_refuses(tmp_path, server=plain).found
    for server, access in (
        ({"host": host}, tls | tokens),
        (plain, tokens),
        ({"host": host, "allow_anonymous": True}, tls),
        (plain | {"allow_anonymous": True}, {}),
    ):
        trainer_access(make_config(tmp_path, server=server, access=access))

    assert control_refuses(host=host).field == "--control-host"
    options = ("--control-certificate", str(pair.certificate), "--control-key", str(pair.key))
    refusal = control_refuses(*options, host=host)
    assert "--control-token" in refusal.next_step and "anonymous" in refusal.next_step
    assert not control_access(*options, "--control-token", f"operate={token}", host=host).anonymous
    allowed = ("--control-allow-plaintext", "--control-allow-anonymous")
    assert control_access(*allowed, host=host).anonymous


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_nothing(tmp_path: Path, host: str) -> None:
    assert is_loopback(host)
    access = trainer_access(make_config(tmp_path, server={"host": host}))
    assert access.anonymous and access.tls is None


def test_refused_trainer_creates_no_files(tmp_path: Path) -> None:
    from draft_trainer.server.app import TrainerServer

    config = make_config(tmp_path, server={"host": "0.0.0.0"})
    with pytest.raises(RefusedError, match=r"server\.host"):
        TrainerServer(config)
    assert not (tmp_path / "registry").exists() and not (tmp_path / "samples").exists()


def test_incomplete_access_options_refused(tmp_path: Path, pki: tuple[Authority, Pair]) -> None:
    authority, pair = pki
    certificate, key, ca = str(pair.certificate), str(pair.key), str(authority.path)
    for access, field, needed in (
        ({"certificate": certificate}, "access.certificate", "access.key"),
        ({"key": key}, "access.key", "access.certificate"),
        ({"client_ca": ca}, "access.client_ca", "access.certificate"),
        (
            {"certificate": certificate, "key": key, "operate_names": ["me"]},
            "access.operate_names",
            "access.client_ca",
        ),
    ):
        refusal = trainer_refuses(tmp_path, access=access)
        assert refusal.field == field and needed in refusal.next_step
    refusal = control_refuses("--control-name", "operate=me")
    assert refusal.field == "--control-name" and "--control-client-ca" in refusal.next_step


def test_token_given_as_option_is_not_echoed() -> None:
    for given in (TOKEN, f"feed={TOKEN}", "operate="):
        assert TOKEN not in str(control_refuses("--control-token", given))


def test_unusable_certificate_files_refused(tmp_path: Path, pki: tuple[Authority, Pair]) -> None:
    authority, pair = pki
    other = authority.sign("other")
    good = {"certificate": str(pair.certificate), "key": str(pair.key)}
    readable = tmp_path / "readable.key"
    readable.write_bytes(pair.key.read_bytes())
    readable.chmod(0o644)
    (tmp_path / "text.pem").write_text("no certificate")
    for changed, field, text in (
        ({"certificate": "/absent.pem"}, "access.certificate", "No such file"),
        ({"key": str(tmp_path)}, "access.key", "Is a directory"),
        ({"key": str(readable)}, "access.key", "everybody"),
        ({"key": str(other.key)}, "access.key", "key values mismatch"),
        ({"certificate": str(tmp_path / "text.pem")}, "access.key", "not encrypted"),
        ({"client_ca": str(tmp_path / "text.pem")}, "access.client_ca", "PEM"),
    ):
        refusal = trainer_refuses(tmp_path, access=good | changed)
        assert refusal.field == field, refusal
        assert text in str(refusal)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "without a token"),
        ("# nothing\n\n", "without a token"),
        ("short\n", "line 1, of 5 characters"),
        (f"{TOKEN}\nwith blanks in the middle of this line\n", "line 2, with other characters"),
        ("é" * 40, "other characters"),
        ("x" * 2000, "of 2000 characters"),
        ("\n".join(f"{n:040d}" for n in range(300)), "300 tokens"),
    ],
)
def test_malformed_token_file_refused(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(RefusedError, match=text) as caught:
        TokenFiles({Role.FEED: [path]}, "access.{role}_tokens")
    assert caught.value.field == "access.feed_tokens"
    assert "blanks" not in str(caught.value) and "short\n" not in str(caught.value)


def test_token_file_lines_and_roles(tmp_path: Path) -> None:
    path = write_token(tmp_path / "token", TOKEN, "  " + "u" * 33 + "  ")
    assert read_tokens(path, "f") == (TOKEN.encode(), b"u" * 33)
    files = TokenFiles({Role.FEED: [path], Role.OPERATE: [path], Role.OBSERVE: []}, "{role}")
    assert files.roles_of(b"u" * 33) == {Role.FEED, Role.OPERATE}
    assert files.roles_of(b"u" * 32) == files.roles_of(b"") == frozenset()
    assert TOKEN not in repr(vars(files)) and TOKEN not in repr(
        [vars(d) for _, d in files._digests]
    )


def test_token_never_sent_in_plaintext(tmp_path: Path) -> None:
    token = write_token(tmp_path / "token", TOKEN)
    shown = {"token_file": str(token)}
    for address in ("192.0.2.1:1", "dns:localhost:1", "host.invalid:1"):
        config = make_config(tmp_path, publish={"rollout_servers": [address]}, credentials=shown)
        with pytest.raises(RefusedError, match="with a token and without TLS"):
            credentials_of(config)
    # The addresses in a file are looked at when a channel to them is opened.
    listed = {"rollout_servers": ["file:servers"]}
    config = make_config(tmp_path, publish=listed, credentials=shown)
    assert credentials_of(config).token_file == token
    with pytest.raises(RefusedError, match="with a token and without TLS"):
        open_channel("192.0.2.1:1", credentials=credentials_of(config))
    config = make_config(
        tmp_path,
        publish={"rollout_servers": ["192.0.2.1:1"]},
        credentials=shown | {"allow_plaintext": True},
    )
    assert credentials_of(config).token_file == token
    with pytest.raises(RefusedError, match=r"trainer: found 192\.0\.2\.1:1 with a token"):
        BridgeConfig("192.0.2.1:1", "run", trainer_credentials=ClientCredentials(token_file=token))
    BridgeConfig("127.0.0.1:1", "run", trainer_credentials=ClientCredentials(token_file=token))


def test_bridge_credentials_checked_at_start(tmp_path: Path) -> None:
    token = write_token(tmp_path / "token", TOKEN)
    good = ClientCredentials(token_file=token)
    config = BridgeConfig("127.0.0.1:1", "run", trainer_credentials=good)
    assert TOKEN not in repr(config)
    for given, field in (
        (ClientCredentials(token_file=tmp_path / "absent"), "trainer_credentials.token_file"),
        (ClientCredentials(server_name="a"), "trainer_credentials.server_name"),
        (ClientCredentials(certificate=token), "trainer_credentials.certificate"),
    ):
        with pytest.raises(RefusedError) as caught:
            BridgeConfig("127.0.0.1:1", "run", trainer_credentials=given)
        assert caught.value.field == field
        assert TOKEN not in str(caught.value)


def test_fifo_as_credential_file_refused(tmp_path: Path, pki: tuple[Authority, Pair]) -> None:
    """No process writes to it: whoever opens it to read waits for ever."""
    authority, pair = pki
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    good = {"certificate": str(pair.certificate), "key": str(pair.key)}
    for access, field in (
        ({"feed_tokens": [str(pipe)]}, "access.feed_tokens"),
        (good | {"certificate": str(pipe)}, "access.certificate"),
        (good | {"key": str(pipe)}, "access.key"),
        (good | {"client_ca": str(pipe)}, "access.client_ca"),
    ):
        refusal = trainer_refuses(tmp_path, access=access)
        assert refusal.field == field and "not a regular file" in refusal.found
    for shown, field in (
        ({"token_file": pipe}, "x.token_file"),
        ({"ca": pipe}, "x.ca"),
        ({"ca": authority.path, "certificate": pipe, "key": pair.key}, "x.certificate"),
    ):
        with pytest.raises(RefusedError, match="not a regular file") as caught:
            ClientCredentials(**shown).check("x.")
        assert caught.value.field == field
    assert control_refuses("--control-token", f"operate={pipe}").field == "--control-token"


def test_token_file_replaced_by_fifo_grants_nothing(tmp_path: Path) -> None:
    path = write_token(tmp_path / "token", TOKEN)
    files = TokenFiles({Role.FEED: [path]}, "{role}")
    assert files.roles_of(TOKEN.encode()) == {Role.FEED}
    path.unlink()
    os.mkfifo(path, 0o600)
    assert files.roles_of(TOKEN.encode()) == frozenset()
