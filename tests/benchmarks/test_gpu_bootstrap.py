"""The GPU benchmark's packages travel to a machine without an index: slim, in parts, installed."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from benchmarks.gpu import bootstrap, pack
from benchmarks.gpu.plan import STEPS

INFO = "engine-1.0.dist-info"
FILES = {
    "slipstream/__init__.py": b"",
    "slipstream/v1/release_pb2.py": b"HERE = 'from the wheel'\n",
    "engine/__init__.py": b"import numpy\n",
    "engine/kernels/fa2.so": b"\x00" * 5000,
    "engine/kernels/fa3.so": os.urandom(5000),
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: engine\nVersion: 1.0\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "engine-1.0-py3-none-any.whl"
    rows = [
        f"{name},sha256={urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},"
        f"{len(data)}\n"
        for name, data in FILES.items()
    ]
    with zipfile.ZipFile(path, "w") as file:
        for name, data in FILES.items():
            file.writestr(name, data)
        file.writestr(f"{INFO}/RECORD", "".join(rows) + f"{INFO}/RECORD,,\n")
    return path


def test_slim_wheel_lists_what_it_holds(wheel: Path, tmp_path: Path) -> None:
    slim = pack.slim(wheel, tmp_path / "slim", ["*/fa2*"])
    with zipfile.ZipFile(slim) as file:
        names = set(file.namelist())
        listed = {row[0] for row in csv.reader(file.read(f"{INFO}/RECORD").decode().splitlines())}
        assert file.read("engine/kernels/fa3.so") == FILES["engine/kernels/fa3.so"]
    assert names == listed == {*FILES, f"{INFO}/RECORD"} - {"engine/kernels/fa2.so"}
    with pytest.raises(ValueError, match="fa4"):
        pack.slim(wheel, tmp_path / "slim", ["*/fa4*"])


def test_wheel_comes_in_parts_and_is_installed_by_the_last(wheel: Path, tmp_path: Path) -> None:
    """One folder of parts a call; in between, and with an altered part, nothing is installed."""
    (tmp_path / "wheels").mkdir()
    shutil.copy(wheel, tmp_path / "wheels")
    parts, site = tmp_path / "parts", tmp_path / "site"
    count = pack.split(tmp_path / "wheels", parts, 4000)
    sizes = [
        sum(piece.stat().st_size for piece in (parts / str(n)).glob("*.whl.*"))
        for n in range(count)
    ]
    assert count == 3 and max(sizes) <= 4000 and sum(sizes) == wheel.stat().st_size
    reasons = [bootstrap.collect(parts / str(number), site) for number in range(count - 1)]
    assert all(wheel.name in reason for reason in reasons) and not (site / "joined").exists()
    (last,) = (parts / str(count - 1)).glob("*.whl.*")
    right = last.read_bytes()
    last.write_bytes(right[:-1] + b"?")
    assert "not what was written" in bootstrap.collect(last.parent, site)[wheel.name]
    last.write_bytes(right)
    assert bootstrap.collect(last.parent, site) == {}
    assert (site / "joined" / "engine" / "kernels" / "fa3.so").exists()
    assert not (site / "parts").exists()


def test_bootstrap_needs_the_standard_library_alone(wheel: Path, tmp_path: Path) -> None:
    """The checkout has no generated code; its own packages come before those of the wheels."""
    checkout = tmp_path / "checkout"
    folder = checkout / "benchmarks" / "gpu"
    folder.mkdir(parents=True)
    for path in (Path(pack.__file__), Path(bootstrap.__file__)):
        shutil.copy(path, folder)
    (checkout / "engine.py").write_text("")
    wheels = checkout / ".whl" / "a"
    wheels.mkdir(parents=True)
    module, site = "benchmarks.gpu.bootstrap", tmp_path / "site"
    base = [sys.executable, "-S", "-m", module, "--site", str(site)]
    # A script's own folder comes first on its path, and not the working directory.
    script = tmp_path / "script.py"
    script.write_text(
        "import engine, json, slipstream.v1.release_pb2 as p\n"
        "print(json.dumps([engine.__file__, p.HERE]))\n"
    )
    env = {"PATH": os.environ["PATH"]}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*base, *options, "--", str(script)]
        return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)

    refused = run()
    assert refused.returncode == 1 and "expected the wheel of `make package`" in refused.stderr
    shutil.copy(wheel, wheels)
    for options in (("--wheels", str(wheels)), ()):
        done = run(*options)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [str(checkout / "engine.py"), "from the wheel"]


def test_plan_fits_the_calls_and_the_half_hour() -> None:
    assert all(len(step.carry) <= 8 and step.seconds <= 600 for step in STEPS.values())
    assert sum(step.seconds for step in STEPS.values()) <= 30 * 60


def test_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no .*whl in {tmp_path}.*Next step: fill it"):
        bootstrap.install(tmp_path, tmp_path / "site")
