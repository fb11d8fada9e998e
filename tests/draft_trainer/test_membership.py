"""Who belongs to the fleet."""

from __future__ import annotations

import socket

import pytest

from draft_trainer.config import parse_config
from draft_trainer.releases.membership import LookedUpMembers, members_of
from slipstream.refusal import RefusedError


def test_a_name_is_looked_up_again_and_the_last_answer_outlives_the_name_service() -> None:
    answers: list[list[str] | None] = [["a:1", "b:1"], ["b:1", "c:1"], None, []]

    def look_up() -> list[str]:
        answer = answers.pop(0)
        if answer is None:
            raise socket.gaierror("no name service")
        return answer

    members = LookedUpMembers("dns:x:1", look_up)
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
    members = members_of(["h:1", "dns:rollouts:50061", "10.0.0.1:50061"])
    assert members.addresses() == ("h:1", "10.0.0.1:50061", "10.0.0.2:50061", "[fd00::1]:50061")


@pytest.mark.parametrize("address", ["dns:rollouts", "dns::5", "host:0", "host"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_config(
            {
                "draft": {"initial": "d", "registry": "r"},
                "publish": {"rollout_servers": [address]},
            }
        )
    assert "publish.rollout_servers" in caught.value.field
