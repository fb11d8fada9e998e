"""``--speculation auto`` on real vLLM: lengths follow the draft, and no request is altered."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, prompts, until

pytestmark = [pytest.mark.vllm, pytest.mark.contract("draft length")]


@pytest.fixture(scope="module")
def auto(serve) -> Live:  # type: ignore[no-untyped-def]
    return serve("--speculation", "auto", "--max-num-seqs", "16")


def planned(server: Live) -> dict[int, int]:
    """Tokens to draft by the number of requests."""
    text = httpx.get(server.http + "/metrics", timeout=30).text
    return {
        int(sample.labels["requests"]): int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "slipstream_rollout_planned_draft_length"
    }


def steps(server: Live) -> dict[tuple[str, int], float]:
    """Engine steps by kind and draft length."""
    text = httpx.get(server.http + "/metrics", timeout=30).text
    found: dict[tuple[str, int], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "slipstream_rollout_engine_steps_total":
                key = sample.labels["kind"], int(sample.labels["draft_length"])
                found[key] = found.get(key, 0) + sample.value
    return found


def test_auto_stops_ruined_draft_and_resumes_good_one(auto: Live, draft_dir: Path) -> None:
    plain_steps = {length for kind, length in steps(auto) if kind == "plain"}
    assert plain_steps == set() or plain_steps == {0}
    assert planned(auto) == {1: 3, 4: 3, 16: 3}
    auto.speculate(False)
    expected = auto.generate(prompts(16))
    auto.speculate(True)
    good = load(draft_dir)
    ruined = perturbed(good, scale=3.0, seed=1)

    def serve_until(drafts: bool) -> None:
        def look() -> bool:
            assert auto.generate(prompts(16)) == expected, drafts
            lengths, enabled = planned(auto).values(), auto.state().speculation_enabled
            return enabled == drafts and (max(lengths) > 0) == drafts

        # A cost that other load on the machine disturbed is measured again after a minute.
        until(look, 600)

    auto.swap(101, ruined)
    serve_until(drafts=False)
    auto.swap(102, good)
    serve_until(drafts=True)
    found = steps(auto)
    assert {length for kind, length in found if kind == "speculative"} == {0, 1, 2, 3}
    assert found["plain", 0] > 0


@pytest.mark.slow
def test_draft_lengths_change_under_load_keeps_output_v2(serve, server_v2: Live) -> None:  # type: ignore[no-untyped-def]
    """Calibration drafts every length in turn while requests run."""
    server_v2.speculate(False)
    expected = server_v2.generate()
    server_v2.speculate(True)
    auto = serve("--speculation", "auto", runner="V2")

    def every_length() -> bool:
        assert auto.generate() == expected
        return {n for kind, n in steps(auto) if kind == "speculative"} >= {1, 2, 3}

    until(every_length, 600)
