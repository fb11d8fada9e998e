"""The simulated fleet: the real publisher, with a network in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.publish_scale.simulation import Network, Scenario, scenarios, simulate
from draft_trainer.releases.spread import FAN_OUT, MOST_SENT

THREADS = 256


def test_trainer_egress_is_constant_in_fleet_size(tmp_path: Path) -> None:
    few = simulate(Scenario(), 20, THREADS, tmp_path / "few")
    many = simulate(Scenario(), 2000, 2048, tmp_path / "many")
    assert few["egress_drafts"] == many["egress_drafts"] <= MOST_SENT
    assert (few["ready_on_it"], many["ready_on_it"]) == (20, 2000)
    # The holders grow by a factor a round, not by a number: 100 times the servers take about
    # log(100) / log(1 + FAN_OUT) rounds more, each of a draft at a receiver's share of a link.
    network = Network()
    one = network.draft_bytes / (network.link / FAN_OUT)
    own = 2000 * (network.state_seconds + network.stage_seconds)
    assert many["stage_seconds"] - few["stage_seconds"] < 6 * one + own + 1.0


def test_release_commits_on_quorum_or_nowhere(tmp_path: Path) -> None:
    for share, live in ((0.02, 1), (0.2, 0)):
        row = simulate(Scenario(failing=share, quorum=0.95), 200, THREADS, tmp_path / str(share))
        assert row["live"] == live
        assert row["ready_on_it" if live else "ready_on_another"] == 200 - row["unreachable"]
        assert row["ready_on_another" if live else "ready_on_it"] == 0


@pytest.mark.parametrize("name", list(scenarios()))
def test_every_scenario_ends_on_one_release(tmp_path: Path, name: str) -> None:
    row = simulate(scenarios()[name], 300, THREADS, tmp_path)
    assert row["live"] == 1 and row["ready_on_another"] == 0
    assert row["ready_on_it"] == 300 - row["unreachable"]
    assert row["egress_drafts"] <= MOST_SENT
