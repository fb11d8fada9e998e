"""The trainers: real processes, pinned and niced: healthy, slow, hung, killed, without memory.

``python -m benchmarks.policy_stall.trainers HOST:PORT`` is the slow trainer's connection: a proxy
that reads so slowly that the sender's buffers fill up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import httpx

from benchmarks.feed_faults.wire import Wire
from benchmarks.workers import TIED
from examples.arithmetic_grpo.processes import Service, free_port

# Not the script, which is not beside the interpreter where packages are in a folder of their own.
DRAFT_TRAINER = [sys.executable, "-m", "draft_trainer.cli.main"]
READY_SECONDS = 240.0
NICE = [*TIED, "nice", "-n", "19"]
SLOW_BYTES_PER_SECOND = 1_000_000
FULL_BYTES = "64k"
REPLAY_BYTES = 64 << 20
_STEPS = "slipstream_trainer_train_steps_total "
# Takes, checks and keeps samples but never has enough to train: the arithmetic of several trainers
# would fall on other rows' steps than their own.
NO_TRAINING = "batch_tokens = 1_000_000_000\nlinger_s = 3600\n"


def write_draft(policy: Path, out: Path) -> None:
    """An untrained draft for a policy's folder."""
    command = [*DRAFT_TRAINER, "init", "--policy", str(policy), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Trainer(AbstractContextManager["Trainer"]):
    """A ``draft-trainer serve``.

    Args:
        name: of its folder.
        folder: for its files.
        draft: what it begins from.
        core: it is pinned to it once it is ready.
        full_memory: give it a directory for shared memory that is too small for the file.
        slow: put a wire of 1 MB/s before it.
        replay_bytes: of its replay buffer, of which a policy version may fill half.
        training: its settings in ``[training]``; by default it never trains.
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
        replay_bytes: int = REPLAY_BYTES,
        training: str = NO_TRAINING,
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
            + f'[replay]\ndirectory = "samples"\ncapacity_bytes = {replay_bytes}\n'
            # A trainer that pauses wants fewer samples.
            + f'[economy]\nmode = "always"\n[training]\nnice = 19\n{training}'
        )
        command = [*NICE, *DRAFT_TRAINER, "serve", "--config", str(config)]
        if full_memory:
            # In a mount namespace of its own.
            mount = f"mount -t tmpfs -o size={FULL_BYTES} tmpfs {memory} && exec " + '"$@"'
            command = ["unshare", "-Urm", "sh", "-c", mount, "sh", *command]
        self._service = Service(
            name, command, home / "log", f"127.0.0.1:{port}", {"OMP_NUM_THREADS": "1"}
        )
        self.address = f"127.0.0.1:{port}"
        self._metrics = f"http://127.0.0.1:{metrics}/metrics"

    def __enter__(self) -> Trainer:
        self._service.start()
        return self

    def wait_ready(self) -> None:
        """Raises ServiceError if it does not come up."""
        self._service.wait_ready(READY_SECONDS)
        confine(self._service.pid, {self._core})
        if self._slow:
            module = "benchmarks.policy_stall.trainers"
            self._wire = subprocess.Popen(
                [*NICE, sys.executable, "-m", module, self.address],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._wire.stdout is not None
            self.address = self._wire.stdout.readline().strip()
            confine(self._wire.pid, {self._core})

    def steps(self) -> float:
        """Read the number of optimizer steps that it took."""
        text = httpx.get(self._metrics, timeout=30).text
        (line,) = (one for one in text.splitlines() if one.startswith(_STEPS))
        return float(line.removeprefix(_STEPS))

    def hang(self) -> None:
        """SIGSTOP."""
        os.killpg(self._service.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL."""
        os.killpg(self._service.pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        self._service.stop(0.5)


def confine(pid: int, cores: Collection[int], but: Collection[int] = ()) -> None:
    """Keep all threads that a process has now, and those that they begin, on ``cores``.

    Args:
        pid: of the process.
        cores: they may run on.
        but: native ids of threads that are left alone.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if int(thread.name) not in but:
            # A thread may end meanwhile.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def main() -> None:
    """The slow trainer's wire; prints its address and serves until killed."""
    wire = Wire(SLOW_BYTES_PER_SECOND)
    wire.lead_to(sys.argv[1])
    print(wire.address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
