"""A real Prometheus scrapes a real rollout server and a real trainer and answers every query."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from benchmarks.publish_faults.memory_server import MemoryServer
from examples.local_prometheus import INSTALL, LocalPrometheus
from policy_bridge import PolicyBridge
from policy_bridge.metrics import BridgeCollector
from slipstream.v1 import rollout_server_pb2 as pb
from tests.deploy import expressions
from tests.deploy.expressions import Expression
from tests.draft_trainer.rig import make_config, running, train_until_released, write_draft
from tests.rollout_server.checkpoints import load
from tests.rollout_server.live import Live, prompts, until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason=f"prometheus is missing: {INSTALL}"
    ),
]

EMPTY = {
    "Samples given up: refused: {{field}}": "nothing is refused",
    "Fill: ring": "the bridge is switched off",
    "SlipstreamNoSamples": "nothing is refused",
    "Alerts": "no alert fires",
    "instance:slipstream_bridge_samples_shed:ratio_rate10m": "the bridge chooses nothing",
}
"""Queries without an answer while all is well, and why."""


@dataclass(frozen=True)
class Watched:
    """A Prometheus, and what the server itself counted in the same time."""

    prometheus: LocalPrometheus
    drafts: int
    accepted: int


@pytest.fixture(scope="module")
def watched(
    server,  # type: ignore[no-untyped-def]
    policy_dir: Path,
    draft_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    live, double = server, MemoryServer(write_draft(folder / "initial"))
    config = make_config(folder, publish={"rollout_servers": [double.address]})
    registry = CollectorRegistry()
    registry.register(BridgeCollector(PolicyBridge.disabled()))
    bridge_http, _ = start_http_server(0, "127.0.0.1", registry)
    before = totals(live)
    with running(config) as (trainer, client):
        metrics_url = dict(re.findall(r"(\w+)=(\S+)", trainer.ready_line))["metrics"]
        prometheus = LocalPrometheus(
            folder / "prometheus",
            {
                "rollout-server": [urlsplit(server.http).netloc],
                "draft-trainer": [urlsplit(metrics_url).netloc],
                "policy": [f"127.0.0.1:{bridge_http.server_port}"],
            },
            interval=0.5,
        )
        prometheus.service.start()
        try:
            prometheus.wait_ready(240)
            until(lambda: len(prometheus.query("up == 1")) == 3, 240)
            client.open()
            client.announce(1)
            client.promote(train_until_released(client))
            use(live, policy_dir, draft_dir, prometheus)
            drafts, accepted = (
                after - earlier for after, earlier in zip(totals(live), before, strict=True)
            )
            seen = "slipstream_rollout_all_drafts_total"
            until(lambda: prometheus.query(seen)[0][1] == totals(live)[0], 240)
            yield Watched(prometheus, drafts, accepted)
        finally:
            assert prometheus.service.stop() == 0
            bridge_http.shutdown()
            double.stop()


def use(live: Live, policy_dir: Path, draft_dir: Path, prometheus: LocalPrometheus) -> None:
    """Everything that a server counts, until its costs are known; leaves it as it was found."""
    live.stage("policy", "watched-policy", 0, load(policy_dir))
    live.stage("draft", "watched", 1, load(draft_dir), trained_against_policy_version=0)
    live.commit("watched-policy", "watched")
    live.speculate(False)
    live.generate(prompts(32))
    live.speculate(True)
    with live.generating(prompts(32)):
        known = "slipstream_rollout_speculation_speed_up"
        until(lambda: bool(prometheus.query(known)), 480)
    live.stub.RollBack(pb.RollBackRequest(), timeout=60)


def totals(live: Live) -> tuple[int, int]:
    """Drafts and accepted tokens of all versions."""
    counters = live.counters().values()
    return sum(c.drafts for c in counters), sum(c.accepted_tokens for c in counters)


def test_live_prometheus_answers_every_query(watched: Watched) -> None:
    asked = [
        *expressions.panels(),
        *expressions.annotations(),
        *expressions.documented(),
        *(Expression(rule.where, rule.where) for rule in expressions.recorded()),
    ]
    answers: dict[str, bool] = {}

    def ask() -> bool:
        for expression in asked:
            key = f"{expression.where} <- {expression.text}"
            if not answers.get(key):
                answers[key] = bool(watched.prometheus.query(expression.text))
        return not missing()

    def missing() -> set[str]:
        return {
            k for k, there in answers.items() if not there and k.partition(" <- ")[0] not in EMPTY
        }

    try:
        until(ask, 240)
    except AssertionError as error:
        raise AssertionError(f"no data: {sorted(missing())}") from error


def test_live_prometheus_evaluates_every_rule(watched: Watched) -> None:
    for alert in expressions.alerts():
        watched.prometheus.query(alert.text)
    body = httpx.get(f"{watched.prometheus.url}/api/v1/rules", timeout=30).json()
    rules = [rule for group in body["data"]["groups"] for rule in group["rules"]]
    assert len(rules) == len(expressions.recorded()) + len(expressions.alerts())
    assert {rule["health"] for rule in rules} == {"ok"}, [r.get("lastError") for r in rules]
    assert watched.prometheus.firing() == set()


def test_live_acceptance_length_matches_server_counters(watched: Watched) -> None:
    expected = 1 + watched.accepted / watched.drafts
    assert 1.5 < expected < 4
    rule = "instance:slipstream_rollout_acceptance_length:rate5m"

    def caught_up() -> bool:
        values = watched.prometheus.query(rule)
        return bool(values) and values[0][1] == pytest.approx(expected, rel=1e-9)

    until(caught_up, 120)
