"""A server of its own: a draft that vLLM would alias, then a clean end by a signal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from slipstream.tensors import digest
from tests.conftest import RunningServer
from tests.rollout_server.checkpoints import load, perturbed, write_draft
from tests.rollout_server.live import Live, prompts, until

pytestmark = pytest.mark.vllm


def descendants(pid: int) -> set[int]:
    """Process ids below ``pid``, itself included, zombies not."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(status.parent.name)] = int(fields[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found & (parents.keys() | {pid})
        found |= more


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_equal_heads_stay_apart_and_sigterm_leaves_nothing(  # type: ignore[no-untyped-def]
    serve, policy_dir: Path, tmp_path: Path
) -> None:
    policy = load(policy_dir)
    draft_dir = write_draft(
        tmp_path / "equal-head", policy_dir, lm_head=policy["lm_head.weight"], version=5
    )
    server: RunningServer = serve("--enforce-eager", draft=draft_dir)
    live = Live(server.stub, server.http)
    assert live.state().draft_version == 5, "from manifest.json"
    before = live.generate(prompts(32))
    ruined = perturbed(load(draft_dir), scale=5.0, seed=1)
    live.stage("draft", "ruined", 6, ruined)
    live.commit("ruined")
    assert live.generate(prompts(32)) == before, "a draft commit must not reach the policy"

    # The draft has no embed_tokens: it uses the policy's, so a push moves both.
    live.stage("policy", "p", 1, perturbed(policy, scale=0.05, seed=2))
    live.commit("p")
    assert live.generate(prompts(32)) != before

    content = digest(ruined["fc.weight"]).hex()
    roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    held = [path for root in roots for path in root.glob(f"slipstream-rollout-*/{content}.*")]
    assert len(held) == 1
    family = descendants(server.service.pid)
    assert len(family) >= 2, "the engine runs in processes of its own"
    assert server.service.stop() == 0
    until(lambda: not any(alive(pid) for pid in family))
    assert not held[0].parent.exists(), "staged weights are not left behind"
