"""The architecture as a test: packages and the layers inside the trainer.

docs/architecture.md states the same in words.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "proto": {"vllm", "ray", "draft_trainer", "policy_bridge", "rollout_server"},
    "policy_bridge": {"vllm", "ray", "transformers", "draft_trainer", "rollout_server"},
    # One trainer process.
    "draft_trainer": {"vllm", "policy_bridge", "rollout_server", "torch.distributed"},
    "rollout_server": {"draft_trainer", "policy_bridge"},
    "examples": {"benchmarks"},
    # The peers' trainers have environments of their own, and so has vLLM.
    "benchmarks": {"vllm", "policy_bridge", "rollout_server"},
}
# The packages that a benchmark measures.
MEASURED = {
    "alerts": {"policy_bridge"},
    # vLLM's own path is imported by vLLM's worker alone.
    "hot_swap": {"vllm"},
    "net_benefit": {"policy_bridge"},
    "publish_faults": {"rollout_server"},
    "feed_faults": {"policy_bridge"},
    "gpu": {"policy_bridge", "rollout_server", "vllm"},
    "plan_published": {"rollout_server"},
    "policy_stall": {"policy_bridge"},
    "transport": {"policy_bridge"},
}
# In the policy's own process: `draft-trainer warmup` captures by the bridge.
WITH_BRIDGE = "draft_trainer/warmup/"
# Of draft_trainer, bottom up. A module imports from its own layer or from below.
LAYERS = (
    ("files", "state", "counters", "config", "config_file"),
    ("kernels", "drafters", "checkpoints"),
    ("ingest",),
    ("releases",),
    ("training",),
    ("server",),
    ("cli", "local", "planning", "warmup"),
)
CORES = {
    "draft_trainer": (
        *("drafters/**/*", "kernels/*", "checkpoints", "planning"),
        *("ingest/arena", "ingest/store", "releases/gate", "releases/registry"),
    ),
    "policy_bridge": ("capture", "hooks", "model", "outbox", "selection"),
    "rollout_server": ("vllm/reload", "control/control", "control/acceptance_counts"),
}


def modules(folder: Path) -> list[Path]:
    """The hand-written Python files below a folder."""
    return [path for path in sorted(folder.rglob("*.py")) if "_pb2" not in path.name]


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too; not for types alone."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def packages(path: Path) -> set[str]:
    """Top-level names of everything that a file imports."""
    return {name.partition(".")[0] for name in imports(path)}


def layer_of(module: str) -> int:
    """Index in ``LAYERS`` of ``draft_trainer.X...``; -1 for the package itself."""
    part = module.split(".")[1] if "." in module else ""
    return next((i for i, layer in enumerate(LAYERS) if part in layer), -1)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_no_other_package(package: str) -> None:
    files = modules(ROOT / package)
    assert files
    for path in files:
        measured = MEASURED.get(path.parent.name, set()) if package == "benchmarks" else set()
        if str(path.relative_to(ROOT)).startswith(WITH_BRIDGE):
            measured = {"policy_bridge"}
        found = packages(path) | imports(path)
        assert not found & (FORBIDDEN[package] - measured), path


def test_trainer_modules_import_no_upper_layer() -> None:
    upward = []
    for path in modules(ROOT / "draft_trainer"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name == "__init__.py":
            continue
        assert layer_of(module) >= 0, f"{module} is in no layer"
        for name in sorted(imports(path)):
            if name.startswith("draft_trainer.") and layer_of(name) > layer_of(module):
                upward.append(f"{module} imports {name}")
    assert not upward, "\n".join(upward)


def test_control_plane_knows_no_vllm() -> None:
    for path in modules(ROOT / "rollout_server" / "control"):
        found = imports(path)
        assert not {n for n in found if n.startswith(("vllm", "rollout_server.vllm"))}, path


def test_contract_imports_no_server_skeleton() -> None:
    """proto/slipstream itself, but for the client, which shows credentials."""
    for path in (ROOT / "proto" / "slipstream").glob("*.py"):
        above = {n for n in imports(path) if n.startswith(("slipstream.serving", "slipstream.ec"))}
        assert path.name == "client.py" or not above, path


@pytest.mark.parametrize("package", CORES)
def test_core_modules_import_no_grpc_or_prometheus(package: str) -> None:
    for name in CORES[package]:
        paths = list((ROOT / package).glob(f"{name}.py"))
        assert paths, name
        for path in paths:
            assert not packages(path) & {"prometheus_client", "grpc"}, path
            assert "_pb2_grpc" not in path.read_text(), path
