"""Every block of shell of the documentation, run by ``bash -e`` as it is printed.

A page's blocks run in their order, in one folder: a checkout in which ``runs`` is empty and POLICY,
DRAFT, MODEL, DIR and FILE are there as the page says. ``READ_AS`` names the addresses and absolute
paths that are others here, ``BEFORE`` what a reader does between two blocks. ``programs.py`` says
how the programs run; bash, openssl and what is in /bin are real; ``NOT_RUN`` does nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file, save_file

from draft_trainer.releases.pointer import promote_offline
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.make_mtp import policy_with_mtp
from examples.arithmetic_grpo.processes import free_port
from slipstream.client import open_channel
from slipstream.v1 import release_pb2
from tests.completions_server import Completions, choice, serving
from tests.docs.programs import write_clients
from tests.draft_trainer.registry_rig import create
from tests.draft_trainer.rig import make_config, running
from tests.tiny import tiny_qwen3

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic_grpo"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
DEADLINE = 280.0
COMPLETION = [*range(8, 68), 2]
BLOCK = re.compile(r"^( *)```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    # With vLLM, in the order of the page and with its blocks of Python.
    **{
        ("tutorial.md", program): "tests/docs/test_tutorial.py"
        for program in ("draft-trainer", "rollout-server", "python")
    },
    ("security.md", "draft-trainer status"): "tests/security/test_processes.py",  # with its TLS
}
"""Blocks by page and first words, and the test that runs them as they are printed."""
READ_AS = {"/models/": "models/", "/var/lib/slipstream/": "var/"}
"""Absolute paths of the pages, under the folder."""
NOT_RUN = ("docker", "git", "kubectl", "make", "pip", "python3", "ray", "torchrun")
"""Programs of others: what they read is tested in tests/deploy. ``python3`` is that of a machine
with a GPU (tests/benchmarks/test_gpu_bootstrap.py)."""
BEFORE = {
    # Two ways to one draft.
    ("operations.md", "draft-trainer warmup --policy POLICY --prompts"): "rm -r draft",
    # The page names every policy alike; this one has the vocabulary of the mask token.
    (
        "mechanisms.md",
        "draft-trainer init --draft-kind dflash",
    ): "rm -r models/the-policy; mv models/large models/the-policy",
    # The trainer asks its servers every two seconds: it has yet to see that drafting is on again.
    (
        "runbook.md",
        "draft-trainer doctor\n",
    ): "for _ in $(seq 500); do draft-trainer doctor > /dev/null && break; done",
}


def blocks(page: str) -> list[str]:
    """Every block of shell of a page, without the indentation of a list."""
    (path,) = [path for path in PAGES if label(path) == page]
    found = [re.sub(f"^{i}", "", b, flags=re.M) for i, b in BLOCK.findall(path.read_text())]
    return [b for b in found if not any(of(page, b, key) for key in ELSEWHERE)]


def of(page: str, block: str, key: tuple[str, str]) -> bool:
    """True if a table's key means the block."""
    return page == key[0] and block.startswith(key[1])


def label(path: Path) -> str:
    """The name of a page in the tables."""
    return path.name if path.parent.name == "docs" else str(path.relative_to(ROOT))


def run_page(
    page: str, folder: Path, changed: dict[str, str], env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run every block of the page in one shell, with some texts of it ``changed``."""
    script = "trap 'echo \"failed: $BASH_COMMAND\" >&2' ERR\n"
    script += "".join(f"{program}() {{ :; }}\n" for program in NOT_RUN)
    for block in blocks(page):
        script += "".join(f"{text}\n" for key, text in BEFORE.items() if of(page, block, key))
        script += block
    for printed, here in changed.items():
        script = script.replace(printed, here)
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


class Answers(Completions):
    """A few tokens for every prompt."""

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        # Without probabilities: those of the page's policy are others.
        return 200, [choice(COMPLETION, [None] * len(COMPLETION))] * body.get("n", 1)


def random_policy(folder: Path, vocab: int) -> None:
    """A policy that computes next to nothing, with the example's tokenizer."""
    tiny_qwen3(vocab_size=vocab, num_hidden_layers=10).save_pretrained(folder)
    for file in (EXAMPLE / "policy").glob("tokenizer*"):
        shutil.copy(file, folder)


def policy_with_head(folder: Path) -> None:
    """The example's policy in the notation with an MTP head, and the head."""
    policy_with_mtp(EXAMPLE / "policy", folder)
    file = folder / "model.safetensors"
    head = load_file(EXAMPLE / "mtp" / file.name)
    save_file({**load_file(file), **head}, file, {"format": "pt"})


def furnish(folder: Path, page: str) -> None:
    """Make the files that a page says its reader has."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", ".venv", "site"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("POLICY", "MODEL"):
        (folder / name).symlink_to(EXAMPLE / "policy")
    for name in ("DRAFT", "DIR"):
        (folder / name).symlink_to(EXAMPLE / "draft")
    for name in ("models", "var/fleet"):
        (folder / name).mkdir(parents=True)
    (folder / "models" / "policy").symlink_to(EXAMPLE / "policy")
    (folder / "models" / "draft").symlink_to(EXAMPLE / "draft")
    (folder / "models" / "small").symlink_to(EXAMPLE / "draft_model")
    if page == "README.md":
        (toml,) = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        (folder / "trainer.toml").write_text(toml)
    elif page == "mechanisms.md":
        policy_with_head(folder / "models" / "the-policy")
        random_policy(folder / "models" / "large", 151936)
    elif page == "operations.md":
        rollouts = [{"prompt": [5, 7, 7 + i], "completion": COMPLETION} for i in range(64)]
        (folder / "FILE").write_text("".join(f"{json.dumps(one)}\n" for one in rollouts))
        (folder / "POLICY").unlink()
        random_policy(folder / "POLICY", 128)
    elif page == "economics.md":
        (folder / "config.json").symlink_to(EXAMPLE / "policy" / "config.json")
        (folder / "lengths.txt").write_text("900\n1500\n4000\n")


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """The socket of the programs."""
    folder = Path(tempfile.mkdtemp(prefix="shell-"))  # short: it is the address of a socket
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs.programs", str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            pass_fds=[listener.fileno()],
        )
    try:
        yield folder / "socket"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        shutil.rmtree(folder)


@contextmanager
def services(folder: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a trainer, whose second draft was released, and of its rollout server."""
    control = f"127.0.0.1:{free_port()}"
    config = make_config(folder, publish={"rollout_servers": [control]})
    registry = Registry(folder / "registry")
    registry.import_initial(folder / "initial")
    gate = release_pb2.GateFigures(passed=True, prompts=12, anchors=345, confidence=0.95)
    create(registry, 1, parent_version=0, gate=gate)
    for version in (0, 1):
        promote_offline(registry, version, pin=False)
    registry.close()
    serve = (
        "from benchmarks.publish_faults.server_process import serve;"
        f"serve('initial', {control.rpartition(':')[2]}, 'fault')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", serve], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        with open_channel(control) as channel:
            grpc.channel_ready_future(channel).result(DEADLINE)
        with running(config) as (server, _):
            yield server.address, control
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("page", [label(path) for path in PAGES if blocks(label(path))])
def test_shell_blocks_of_page_run_in_order(page: str, tmp_path: Path, programs: Path) -> None:
    if page == "security.md" and shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    write_clients(tmp_path / "bin", str(programs))
    folder = tmp_path / "slipstream"
    folder.mkdir()
    furnish(folder, page)
    env = {
        **{"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        **{"HOME": os.environ["HOME"], "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
        "HF_HUB_OFFLINE": "1",
    }
    changed = dict(READ_AS)
    with ExitStack() as stack:
        changed[":8000"] = f":{stack.enter_context(serving(Answers))}"
        if page == "runbook.md":
            (tmp_path / "services").mkdir()
            trainer, control = stack.enter_context(services(tmp_path / "services"))
            env["TRAINER"] = trainer
            changed["127.0.0.1:50061"] = control
        done = run_page(page, folder, changed, env)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_documented_servers_ignore_generation_config() -> None:
    """A request's own parameters alone, whatever the policy's generation_config.json says."""
    pages = set()
    for path in PAGES:
        text = "".join(block for _, block in BLOCK.findall(path.read_text()))
        for line in text.replace("\\\n", "").splitlines():
            if re.search(r"rollout-server (serve|fleet) ", line):
                assert "--generation-config vllm" in line, f"{path}: {line}"
                pages.add(path.name)
    assert {"README.md", "tutorial.md", "deployment.md", "mechanisms.md", "security.md"} <= pages
