"""The trainers as real processes, pinned and niced, each in a state of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.policy_stall.affinity import confine
from examples.arithmetic_grpo.processes import Service, free_port

READY_SECONDS = 240.0
# Gone with this process, however that ends.
TIED = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
NICE = [*TIED, "nice", "-n", "19"]
SLOW_BYTES_PER_SECOND = 1_000_000
FULL_BYTES = "64k"
REPLAY_BYTES = 64 << 20
# Takes, checks and keeps samples, and waits for more of them to train. What the arithmetic and the
# checkpoints of several trainers take of memory and disk fell on whichever row had its step just
# then, one without a bridge as well: its slowest took 1.5 to 2.9 times the median, not 1.3.
NO_TRAINING = "batch_tokens = 1_000_000_000\nlinger_s = 3600\n"


def write_draft(policy: Path, out: Path) -> None:
    """An untrained draft for a policy's folder."""
    command = [_script("draft-trainer"), "init", "--policy", str(policy), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Trainer(AbstractContextManager["Trainer"]):
    """A ``draft-trainer serve``.

    Args:
        name: of its folder.
        folder: for its files.
        draft: what it begins from.
        core: it is pinned to it once it is ready.
        full_memory: give it a directory for shared memory that has no room for a ring.
        slow: put a wire of 1 MB/s before it.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        draft: Path,
        core: int,
        *,
        full_memory: bool = False,
        slow: bool = False,
    ) -> None:
        self._core, self._slow = core, slow
        self._wire: subprocess.Popen[str] | None = None
        home = folder / name
        home.mkdir(parents=True)
        memory = home / "memory"
        memory.mkdir()
        port, metrics = free_port(), free_port()
        config = home / "draft-trainer.toml"
        config.write_text(
            f"[server]\nport = {port}\nmetrics_port = {metrics}\n"
            + (f'shared_memory = "{memory}"\n' if full_memory else "")
            + f'[draft]\ninitial = "{draft.resolve()}"\nregistry = "releases"\n'
            # Beside the rest: a trainer that is killed leaves nothing behind elsewhere.
            + f'[replay]\ndirectory = "samples"\ncapacity_bytes = {REPLAY_BYTES}\n'
            + f"[training]\nnice = 19\n{NO_TRAINING}"
        )
        command = [*NICE, _script("draft-trainer"), "serve", "--config", str(config)]
        if full_memory:
            # A namespace of its own: nobody else's memory is filled.
            mount = f"mount -t tmpfs -o size={FULL_BYTES} tmpfs {memory} && exec " + '"$@"'
            command = ["unshare", "-Urm", "sh", "-c", mount, "sh", *command]
        self._service = Service(
            name, command, home / "log", f"127.0.0.1:{port}", {"OMP_NUM_THREADS": "1"}
        )
        self.address = f"127.0.0.1:{port}"

    def __enter__(self) -> Trainer:
        self._service.start()
        return self

    def wait_ready(self) -> None:
        """Raises ServiceError if it does not come up."""
        self._service.wait_ready(READY_SECONDS)
        confine(self._service.pid, {self._core})
        if self._slow:
            module = f"{__package__}.throttle"
            self._wire = subprocess.Popen(
                [*NICE, sys.executable, "-m", module, self.address,
                 str(SLOW_BYTES_PER_SECOND)],
                stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            assert self._wire.stdout is not None
            self.address = f"127.0.0.1:{int(self._wire.stdout.readline())}"
            # Unpinned it ran on the policy's core whenever a row kept the other one busy.
            confine(self._wire.pid, {self._core})

    def hang(self) -> None:
        """It stops reading, and everything else."""
        os.killpg(self._service.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """It is gone, with nothing said."""
        os.killpg(self._service.pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        self._service.stop(0.5)


def _script(name: str) -> str:
    return str(Path(sys.executable).parent / name)
