"""Nothing of the project unpickles or runs what it was given: its own sources are scanned."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract("hostile peers")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("proto", "policy_bridge", "draft_trainer", "rollout_server", "examples", "benchmarks")
MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("jsonpickle", "ruamel"),
}
CALLS = {
    *("eval", "exec", "compile", "torch.load", "torch.save", "numpy.load", "np.load"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
    *("os.system", "torch.hub.load", "torch.jit.load"),
}
# These pickle what they carry, and unpickle what they are sent.
CARRIERS = {
    *("multiprocessing.connection", "Pipe", "Queue", "SimpleQueue", "Manager", "Listener"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
ALLOWED = {
    # The policy's own ranks: one torch.distributed group, which carries its gradients as well.
    "examples/torch_loop/train.py": {"broadcast_object_list"},
    # A benchmark's own child processes, over pipes that nobody else has.
    "benchmarks/publish_faults/rig.py": {"multiprocessing.connection", "Pipe"},
    "benchmarks/publish_faults/trainer_process.py": {"multiprocessing.connection"},
    "benchmarks/hot_swap/load.py": {"multiprocessing.connection", "Pipe"},
}


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (p for p in (ROOT / folder).rglob("*.py") if "_pb2" not in p.name)


def found_in(tree: ast.AST) -> set[str]:
    """Names of forbidden modules, calls and carriers in a source."""
    found: set[str] = set()
    carriers = _imports_multiprocessing(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {n.name.partition(".")[0] for n in node.names} & MODULES
            found |= {n.name for n in node.names} & CARRIERS
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module.partition(".")[0]} & MODULES
            found |= {module} & CARRIERS
            found |= {f"{module}.{n.name}" for n in node.names} & CALLS
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            last = name.rpartition(".")[2]
            found |= {name} & CALLS
            if last.endswith(("_object", "_object_list")) or (carriers and "." in name):
                found |= {last} & CARRIERS
            shelled = any(k.arg == "shell" and not _is_false(k.value) for k in node.keywords)
            if shelled and name.startswith("subprocess."):
                found.add("shell=True")
            if any(k.arg == "trust_remote_code" and not _is_false(k.value) for k in node.keywords):
                found.add("trust_remote_code")
    return found


def _imports_multiprocessing(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Import) and any("multiprocessing" in n.name for n in node.names)
        for node in ast.walk(tree)
    )


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_source_unpickles_or_evaluates() -> None:
    paths = list(sources())
    assert len(paths) > 200
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        assert found_in(ast.parse(path.read_text())) <= ALLOWED.get(name, set()), name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "from multiprocessing.connection import Client",
        "import torch; torch.load(path)",
        "import torch; torch.save(x, path)",
        "import yaml; yaml.load(text)",
        "eval(text)",
        "import multiprocessing as mp; mp.Queue()",
        "import torch.distributed as dist; dist.broadcast_object_list(x)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_no_pickle_scan_finds_violations(source: str) -> None:
    assert found_in(ast.parse(source))
