"""What an actor says of a start that fails, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollout_server.ray_ranks import Rank, RanksPlan, Start
from slipstream.security import ClientCredentials
from tests.deploy.fleet import wait_for

pytest.importorskip("ray", reason="Ray is not installed: pip install 'slipstream-rl[ray]'")


def test_a_node_without_the_ca_runs_every_rank_but_the_one_that_is_asked(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit(3)")
    credentials = ClientCredentials(ca=tmp_path / "absent.pem")
    plan = RanksPlan(command, 2, "192.0.2.1:1", host="127.0.0.1", credentials=credentials)
    rank = Rank(plan)
    rank.start(Start(1, 0, 2, "127.0.0.1", 1))
    wait_for(lambda: "absent.pem" in rank.report().end, 60)
    assert rank.report().refused
    rank.start(Start(2, 1, 2, "127.0.0.1", 1))
    wait_for(lambda: rank.report().end == "ended with status 3", 60)
    rank.stop()


def test_a_rank_whose_command_cannot_be_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    rank = Rank(RanksPlan(("trainer",), 1, "127.0.0.1:1", host="127.0.0.1"))
    rank.start(Start(1, 0, 1, "127.0.0.1", 1))
    wait_for(lambda: "/no/python" in rank.report().end, 60)
    assert not rank.report().refused
    rank.stop()
