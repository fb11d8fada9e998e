"""The members of the fleet, as they come and go."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from draft_trainer.config import PublishConfig
from draft_trainer.config_file import load_config, parse_config
from draft_trainer.releases import fleet as fleets
from draft_trainer.releases.fleet import LOOK_UP_SECONDS, Fleet, Members
from draft_trainer.releases.rollout_client import Failure
from slipstream.errors import RefusedError
from slipstream.serving.identity import ClientCredentials
from tests.security.certificates import write_token


def test_dns_failure_keeps_last_known_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[list[str] | None] = [["a", "b"], ["b", "c"], None, []]

    def resolve(name: str, port: int, **_: object) -> list[tuple[object, ...]]:
        answer = answers.pop(0)
        if answer is None:
            raise socket.gaierror("no name service")
        return [(0, 0, 0, "", (host, port)) for host in answer]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    members = Members(["dns:x:1"])
    assert members.addresses() == ("a:1", "b:1")
    assert members.addresses() == ("b:1", "c:1")
    assert members.addresses() == ("b:1", "c:1")
    assert members.addresses() == ()


def test_list_and_dns_names_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert (name, port) == ("rollouts", 50061)
        hosts = ("10.0.0.2", "10.0.0.1", "fd00::1")
        return [(0, 0, 0, "", (host, port)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    members = Members(["h:1", "dns:rollouts:50061", "10.0.0.1:50061"])
    assert members.addresses() == ("h:1", "10.0.0.1:50061", "10.0.0.2:50061", "[fd00::1]:50061")


def test_missing_member_file_keeps_last_known_members(tmp_path: Path) -> None:
    config = tmp_path / "trainer.toml"
    config.write_text(
        '[draft]\ninitial = "d"\nregistry = "r"\n[publish]\nrollout_servers = ["file:fleet"]\n'
    )
    entries = load_config(config).publish.rollout_servers
    assert entries == (f"file:{tmp_path / 'fleet'}",)
    members, fleet = Members(entries), tmp_path / "fleet"
    assert members.addresses() == ()
    for text, expected in (
        ("10.0.0.1:50061\n10.0.0.2:50061\n", ("10.0.0.1:50061", "10.0.0.2:50061")),
        # What is no list of addresses says nothing about the fleet.
        ("10.0.0.1:50061\n10.0.0", ("10.0.0.1:50061", "10.0.0.2:50061")),
        ("10.0.0.2:50061\n", ("10.0.0.2:50061",)),
        ("", ()),
    ):
        fleet.write_text(text)
        assert members.addresses() == expected


@pytest.mark.parametrize("address", ["dns:rollouts", "dns::5", "host:0", "host", "file:"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_config(
            {
                "draft": {"initial": "d", "registry": "r"},
                "publish": {"rollout_servers": [address]},
            }
        )
    assert "publish.rollout_servers" in caught.value.field


def test_fleet_start_waits_for_slow_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def late(entry: str) -> list[str]:
        assert not over.wait(2 * LOOK_UP_SECONDS)
        return ["a:1"]

    def silent(entry: str) -> list[str]:
        over.wait()
        return []

    monkeypatch.setattr(fleets, "look_up", late)
    fleet = Fleet(PublishConfig(rollout_servers=("dns:rollouts:1",)))
    assert fleet.addresses == ("a:1",)
    monkeypatch.setattr(fleets, "look_up", silent)
    assert fleet.refresh() == fleet.refresh() == ("a:1",)
    fleet.close()
    assert all(t.daemon for t in threading.enumerate() if t.name == "members"), "none delays exit"
    over.set()


def test_member_without_tls_is_left_out_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "LOOK_UP_SECONDS", 25.0)
    members = tmp_path / "fleet"
    members.write_text("127.0.0.1:1\n127.0.0.1:2\n")
    credentials = ClientCredentials(token_file=write_token(tmp_path / "token", "operate" * 8))
    fleet = Fleet(PublishConfig(rollout_servers=(f"file:{members}",)), credentials=credentials)
    left = fleet.client("127.0.0.1:2")
    monkeypatch.setattr(fleets, "LEFT_SECONDS", 0.0)
    members.write_text("127.0.0.1:1\n192.0.2.1:3\n127.0.0.1:4\n")
    for _ in range(2):
        assert fleet.refresh() == fleet.addresses == ("127.0.0.1:1", "127.0.0.1:4")
    (text,) = caplog.messages
    assert text.startswith("192.0.2.1:3 is left out") and "without TLS" in text
    state = left.state()
    assert isinstance(state, Failure) and "closed" in state.text, "its channel is closed"
    fleet.close()
