"""Every command of the documentation is one that the programs understand.

What is costly to run is run elsewhere (``make test`` by CI, the demo and the benchmarks by hand);
here its options are checked against the program's own parser or help, so that none goes stale.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draft_trainer.cli.main import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# A program that is not ours, and the test that runs it as the documentation does.
ELSEWHERE = {
    ".": "tests/docs/test_tutorial.py",
    "mkdir": "tests/docs/test_tutorial.py",
    "torchrun": "tests/adapters/test_ranks.py",
    "grpcurl": "tests/deploy/test_prometheus.py",
    "grpc_health_probe": "tests/deploy/test_health.py",
    "docker": "tests/deploy/test_documentation.py",
    "kubectl": "tests/deploy/test_documentation.py",
    "ray": "tests/deploy/test_documentation.py",
    "pip": "tests/benchmarks/test_gpu.py",
    "PEERS/modelopt/bin/python": "tests/draft_trainer/test_golden_modelopt.py",
    **dict.fromkeys(
        ("umask", "openssl", "printf", "for", "export"), "tests/security/test_processes.py"
    ),
}
VLLM_OPTIONS = (
    *("--served-model-name", "--max-model-len", "--enforce-eager"),
    *("--data-parallel-size", "--enable-expert-parallel"),
)
"""vLLM's own, which the tests of the tutorial and of data-parallel ranks give to a server."""


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command line in a block of shell."""
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(re.sub(r"\[[^\]]*\]", "", line), comments=True)
                if words:
                    yield page.name, words


def options_of(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def test_there_are_commands() -> None:
    assert {"README.md", "operations.md", "benchmarks.md"} <= {page for page, _ in commands()}


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: str(value)[:60])
def test_a_command_is_understood(
    page: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *arguments = words
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "draft-trainer":
        parse(arguments)
    elif program == "rollout-server":
        assert arguments[0] in ("serve", "fleet")
        files = ["launch.py"]
        files += ["ray_fleet.py"] if arguments[0] == "fleet" else []
        text = "".join((ROOT / "rollout_server" / file).read_text() for file in files)
        for option in options_of(arguments):
            assert f'"{option}"' in text or option in VLLM_OPTIONS, option
    elif program == "python" and arguments[0].endswith(".py"):
        assert arguments[0] == "runs/tutorial/train.py"  # tests/docs/test_tutorial.py runs it
    elif program == "python":
        assert arguments[0] == "-m"
        monkeypatch.setattr(sys, "argv", ["program", "--help"])
        text = help_of(arguments[1], capsys)
        for option in options_of(arguments[2:]):
            assert re.search(rf"{option}\b", text), f"{option} is not in {arguments[1]} --help"
    else:
        assert (ROOT / ELSEWHERE[program]).exists()


def help_of(module: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``python -m MODULE --help`` prints."""
    inner = f"{module}.__main__"
    package = importlib.util.find_spec(module)
    assert package is not None, f"no module {module}"
    found = importlib.import_module(inner if package.submodule_search_locations else module)
    with pytest.raises(SystemExit) as ended:
        found.main()
    assert ended.value.code == 0
    return capsys.readouterr().out
