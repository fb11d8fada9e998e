"""``python -m docs.first_hour``: types docs/tutorial.md in a fresh clone, and writes the log.

Clones the repository, makes the environment as README says, then types every block of the tutorial
in order, with nothing else in the environment. The log, docs/first_hour.md, has each command, what
it took and the end of what it said. Needs 5 GB, a network for the packages and the ports of the
tutorial. ``tests/docs/test_tutorial.py`` types the same page on other ports.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, chdir
from dataclasses import dataclass
from pathlib import Path

from examples.arithmetic_grpo.processes import Service, Services

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
OUT = ROOT / "docs" / "first_hour.md"
READY_SECONDS = 600.0
COMMAND_SECONDS = 600.0
SETUP_SECONDS = 1800.0
SAID_LINES = 12
SAID_COLUMNS = 110
PORTS = {"rollout-server": "50061", "draft-trainer": "50051"}
"""gRPC ports of the tutorial's services, where their health is asked for."""

_BLOCK = re.compile(r"^## ([^\n]*)$|^```(sh|python|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Typed:
    """A command.

    Attributes:
        section: of the page.
        command: as it was typed.
        seconds: until it ended; of a service, until it was ready.
        said: the end of its output.
    """

    section: str
    command: str
    seconds: float
    said: str


class Reader:
    """Types the tutorial.

    Args:
        root: the checkout.
        scripts: folder of the environment's programs.
        stack: ends the services.
        ports: others than the page's, by the page's.
        folder: in place of ``runs/tutorial``.
        env: added to the environment.

    Attributes:
        typed: every command so far.
        said: the whole output of the last one that ended.
    """

    def __init__(
        self,
        root: Path,
        scripts: Path,
        stack: ExitStack,
        *,
        ports: Mapping[str, str] | None = None,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._root, self._scripts, self._stack = root, scripts, stack
        self._ports = dict(ports or {})
        self.folder = folder or root / "runs" / "tutorial"
        self._moved = folder is not None
        path = f"{scripts}:{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, **(env or {})}
        self._server: ExitStack | None = None
        self._exported: dict[str, str] = {}
        self.typed: list[Typed] = []
        self.said = ""

    def page(self, text: str) -> None:
        """Every block of a page in order. Raises RuntimeError: a command failed."""
        section = ""
        for title, language, block in _BLOCK.findall(text):
            if title:
                section = title
            elif language == "sh":
                self.shell(section, block)
            elif language == "toml":
                (self.folder / "trainer.toml").write_text(self._here(block))
            elif "sys.argv" in block:
                (self.folder / "train.py").write_text(self._here(block))
            else:
                self._run(section, "python", ["python", "-c", self._here(block)])

    def shell(self, section: str, block: str) -> None:
        """Every line of a block of shell."""
        for line in block.replace("\\\n", " ").splitlines():
            typed = " ".join(line.split())
            text = self._here(typed)
            for name, value in self._exported.items():
                text = text.replace(f"${name}", value)
            words = text.split()
            if words[:1] in ([], ["."]):
                continue  # the environment is active
            if words[0] == "export":
                name, _, value = words[1].partition("=")
                self._exported[name] = self._env[name] = value
                continue
            if words[1:2] == ["serve"] and "--check" not in words:
                self._start(section, typed, words)
                continue
            asks = words[1:2] and words[1] in ("status", "doctor", "releases")
            if self._ports and words[0] == "draft-trainer" and asks:
                # The page's trainer listens where these ask by default.
                words += ["--address", f"127.0.0.1:{self._ports['50051']}"]
            self._run(section, typed, words)

    def _here(self, text: str) -> str:
        for port, other in self._ports.items():
            text = re.sub(rf"\b{port}\b", other, text)
        return text.replace("runs/tutorial", str(self.folder)) if self._moved else text

    def _run(self, section: str, typed: str, words: list[str]) -> None:
        began = time.monotonic()
        done = subprocess.run(
            words,
            cwd=self._root,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        self.said = done.stdout
        if done.returncode:
            raise RuntimeError(f"{typed}: exit status {done.returncode}\n{done.stdout[-4000:]}")
        self.typed.append(Typed(section, typed, time.monotonic() - began, shortened(self.said)))

    def _start(self, section: str, typed: str, words: list[str]) -> None:
        stack, port = self._stack, PORTS[words[0]]
        if words[0] == "rollout-server":
            if self._server is not None:
                self._server.close()
            self._server = stack = self._stack.enter_context(ExitStack())
        elif self._ports:
            # The ports of the page are the defaults of [server].
            words += ["--set", f"server.port={self._ports['50051']}"]
            words += ["--set", f"server.metrics_port={self._ports['9464']}"]
        log = self.folder / f"{words[0]}-{len(self.typed)}.log"
        health = f"127.0.0.1:{self._ports.get(port, port)}"
        words[0] = str(self._scripts / words[0])
        service = Service(words[0], words, log, health, self._env)
        stack.enter_context(Services(service))
        seconds = service.wait_ready(READY_SECONDS)
        said = shortened(log.read_text(errors="replace"), 2)
        self.typed.append(Typed(section, typed, seconds, said))


def shortened(text: str, lines: int = SAID_LINES) -> str:
    """The end of an output: without colours, progress bars and the rest of long lines."""
    kept = [_COLOUR.sub("", line.rpartition("\r")[2]).rstrip() for line in text.split("\n")]
    kept = [line for line in kept if line and "━" not in line]
    cut = [line if len(line) <= SAID_COLUMNS else line[:SAID_COLUMNS] + " ..." for line in kept]
    return "\n".join(["...", *cut[-lines:]] if len(cut) > lines else cut)


def set_up(repository: str, folder: Path, python: str) -> tuple[Path, list[Typed]]:
    """A clone with its environment. Raises RuntimeError: a command failed."""
    typed, root = [], folder / "slipstream"
    commands = (
        (["git", "clone", "--quiet", repository, str(root)], "git clone ... slipstream", folder),
        (["make", "setup", f"PYTHON={python}"], "make setup", root),
    )
    for words, shown, where in commands:
        began = time.monotonic()
        done = subprocess.run(
            words,
            cwd=where,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SETUP_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{shown}: exit status {done.returncode}\n{done.stdout[-4000:]}")
        # What make says is its own commands, with the paths of this machine.
        typed.append(Typed("Set up", shown, time.monotonic() - began, ""))
    return root, typed


def page(typed: list[Typed], commit: str) -> str:
    """The log as a page."""
    setup = sum(one.seconds for one in typed if one.section == "Set up")
    total = sum(one.seconds for one in typed)
    parts = [
        "# The first hour: a log\n\n"
        "Written by `python -m docs.first_hour`, which runs [the tutorial](tutorial.md) in a fresh "
        f"clone, here of commit {commit},\nwith a new environment: {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, no GPU. The commands took {_minutes(total)}, "
        f"{_minutes(setup)} of them\nfor the set-up with its downloads. The time of a service is "
        "the time until it was ready. Of each output, only the\nend is shown.\n"
    ]
    section = ""
    for one in typed:
        if one.section != section:
            section = one.section
            parts.append(f"## {section or 'The folder'}\n")
        block = f"$ {one.command}\n{one.said}".rstrip()
        parts.append(f"{one.seconds:.0f} s:\n\n```text\n{block}\n```\n")
    return "\n".join(parts)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.first_hour",
        description=(__doc__ or "").split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, help="where; a temporary one if it is not given")
    parser.add_argument("--python", default="python3", help="of the new environment")
    parser.add_argument("--out", type=Path, default=OUT, help="the log")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = (chosen.folder or Path(temporary)).resolve()
        root, typed = set_up(str(ROOT), folder, chosen.python)
        scripts = root / ".venv" / "bin"
        stack.enter_context(chdir(root))  # services start where this process is
        reader = Reader(root, scripts, stack)
        reader.page((root / TUTORIAL.relative_to(ROOT)).read_text(encoding="utf-8"))
        describe = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
        text = page([*typed, *reader.typed], commit).replace(f"{root}/", "")
        chosen.out.write_text(text, encoding="utf-8")
    print(f"{chosen.out}: {len(reader.typed)} commands")
    return 0


if __name__ == "__main__":
    sys.exit(main())
