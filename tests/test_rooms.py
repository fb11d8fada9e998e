"""Each room imports only what the architecture allows; nothing unpickles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "proto": {"vllm", "ray", "draft_trainer", "policy_bridge", "rollout_server"},
    "policy_bridge": {"vllm", "ray", "transformers", "draft_trainer", "rollout_server"},
    "draft_trainer": {"vllm", "policy_bridge", "rollout_server"},
    "rollout_server": {"draft_trainer", "policy_bridge"},
    # The peers' trainers have environments of their own, and so has vLLM.
    "benchmarks": {"vllm", "policy_bridge", "rollout_server"},
}
# A benchmark imports the rooms that it times, and no other.
TIMED = {
    "alerts": {"policy_bridge"},
    # Its half of vLLM's own path is imported by vLLM's worker alone.
    "hot_swap": {"vllm"},
    "metrics_overhead": {"rollout_server"},
    "publish_faults": {"rollout_server"},
    "robustness": {"rollout_server"},
    "feed_faults": {"policy_bridge"},
    "policy_stall": {"policy_bridge"},
    "transport": {"policy_bridge"},
}
CORES = {
    "draft_trainer": (
        *("eagle3/*", "kernels/*", "training/*", "checkpoints/**/*", "recordings/*", "offline/*"),
        *("feed/arena", "feed/draw_log", "feed/held", "feed/kept_policies", "feed/ledger"),
        *("feed/placement", "feed/policy_files", "feed/replay", "feed/reservation"),
        *("feed/sample", "feed/store", "feed/stored"),
        *("releases/gate", "releases/registry"),
    ),
    "policy_bridge": (
        *("batch", "call_hooks", "capture", "capture_plan", "extraction", "gather", "gate"),
        *("logprobs", "matrices", "modules", "outbox", "pool", "runner", "selection"),
        *("side_thread", "switch", "tap", "wrappers"),
    ),
    "rollout_server": ("reload", "content_store", "control", "acceptance_tracker", "weights"),
}


def imports(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_room_imports_another(room: str) -> None:
    files = [path for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name]
    assert files
    for path in files:
        timed = TIMED.get(path.parent.name, set()) if room == "benchmarks" else set()
        assert not imports(path) & (FORBIDDEN[room] - timed), path
        assert not imports(path) & {"pickle", "cloudpickle", "dill", "joblib"}, path


@pytest.mark.parametrize("room", CORES)
def test_the_core_of_a_room_knows_neither_grpc_nor_prometheus(room: str) -> None:
    for name in CORES[room]:
        paths = list((ROOT / room).glob(f"{name}.py"))
        assert paths, name
        for path in paths:
            assert not imports(path) & {"prometheus_client", "grpc"}, path
            assert "_pb2_grpc" not in path.read_text(), path
