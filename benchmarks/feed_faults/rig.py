"""A trainer and a policy that may be killed at any time, and the wire between them."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.feed_faults import processes
from benchmarks.feed_faults.books import Audit, Books, Records, sample_folder
from benchmarks.feed_faults.wire import Wire
from examples.local_services import ARITHMETIC
from policy_bridge import BridgeConfig
from slipstream.client import open_channel
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from tests.draft_trainer.rig import Client, Stream

RUN, EPOCHS = "faults", 2
_POLL = 0.02
_DELETED = " (deleted)"
# Small batches, states often, and a gate that nothing passes.
_TOML = """
[server]
port = 0
metrics_port = 0
shared_memory = "{memory}"
[draft]
initial = "{draft}"
registry = "registry"
[replay]
capacity_bytes = 268435456
max_epochs = {epochs}
max_policy_lag = 1000
held_out_fraction = 0.02
[training]
batch_tokens = 96
linger_s = 0.02
state_every_steps = 8
nice = 0
cpu_kernels = "off"
[gate]
min_anchors = 1000000
[economy]
mode = "always"
"""


class Rig:
    """Starts, damages and stops processes; the owner calls ``stop``.

    Processes are forked from one that has imported everything, so that starting one again takes a
    moment and not seconds. Nothing is ever released here: every restart resumes a training state.

    Args:
        folder: of a table; empty.
        patience: seconds after which what should have happened is given up for stalled.

    Attributes:
        wire: between policy and trainer.
        records: what the policy saw.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self._patience = patience
        self._home, self.registry = folder, folder / "registry"
        # In memory, as in production, and of this rig alone: what is left is found at the end.
        self.memory = Path("/dev/shm") / f"feed-faults-{uuid.uuid4().hex[:8]}"
        self.memory.mkdir()
        scratch = folder / "scratch"
        scratch.mkdir()
        toml = _TOML.format(memory=self.memory, draft=ARITHMETIC / "draft", epochs=EPOCHS)
        (folder / "trainer.toml").write_text(toml)
        self._context = mp.get_context("forkserver")
        # The command's own module too: every child imports it first.
        self._context.set_forkserver_preload([processes.__name__, f"{__package__}.__main__"])
        self.wire = Wire()
        self.records = Records(folder)
        self._books = Books(self.records, RUN, EPOCHS, scratch)
        self._trainer: Any = None
        self._policy: Any = None
        self._address = ""
        self._log = folder / "trainer.log"
        self._log_at = 0
        self._seed = 0
        self.transport = ""
        # Whether a fault has truncated the shared file of the policy that runs.
        self.cut_short = False

    # Processes.

    def start_trainer(self) -> None:
        """Start it; ``wait_ready`` waits for it."""
        self._log_at = self._log.stat().st_size if self._log.exists() else 0
        self._trainer = self._context.Process(
            target=processes.serve,
            args=(str(self._home / "trainer.toml"), str(self._log)),
            daemon=True,
        )
        self._trainer.start()

    def wait_ready(self) -> None:
        """The trainer that was started answers, and the wire leads to it."""

        def ready() -> bool:
            if not self._log.exists():
                return False
            with self._log.open("rb") as file:
                file.seek(self._log_at)
                for line in file:
                    if line.startswith(b"draft-trainer ready:"):
                        values = dict(word.split("=", 1) for word in line.decode().split()[2:])
                        self._address = values["grpc"]
                        return True
            return False

        self.wait_for(ready, "the trainer is ready")
        self.wire.lead_to(self._address)

    def start_policy(self, transport: str) -> None:
        """Start it, with its states going by ``shared_memory`` or ``grpc``."""
        self.transport = transport
        self._seed += 1
        # Short deadlines: what waits for one is over soon, and a stall stands out.
        bridge = BridgeConfig(
            trainer=self.wire.address,
            run_id=RUN,
            transport=transport,
            shared_memory=str(self.memory),
            outbox_bytes=4 << 20,
            connect_seconds=1.0,
            rpc_seconds=2.0,
            sync_seconds=2.0,
            announce_seconds=5.0,
            stall_seconds=5.0,
            max_backoff_seconds=0.3,
        )
        policy, home = str(ARITHMETIC / "policy"), str(self._home)
        orders = processes.Orders(policy, home, self._seed, bridge)
        self._policy = self._context.Process(target=processes.train, args=(orders,), daemon=True)
        self._policy.start()

    def use(self, transport: str) -> None:
        """Have the policy ship that way now, if need be by ending it and starting another one."""
        # A bridge that finds its file cut short, now or later, goes on inline.
        fell_back = transport == "shared_memory" and (
            self.cut_short or not self._open_files(self._policy.pid)
        )
        self.cut_short = False
        if self.transport != transport or fell_back:
            self.end_policy()
            self.start_policy(transport)
            self.wait_acknowledged()

    def kill_trainer(self) -> None:
        """kill -9."""
        self._kill(self._trainer)

    def kill_policy(self) -> None:
        """kill -9."""
        self._kill(self._policy)

    def end_policy(self) -> None:
        """SIGTERM: the bridge drains and closes."""
        self._end(self._policy, "policy")

    def end_trainer(self) -> None:
        """SIGTERM."""
        self._end(self._trainer, "trainer")

    def signal_policy(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self._policy.pid, number)

    def stop_trainer(self) -> None:
        """SIGSTOP; the process is stopped when this returns."""
        os.kill(self._trainer.pid, signal.SIGSTOP)
        self.wait_for(lambda: _is_stopped(self._trainer.pid), "the trainer stopped")

    def continue_trainer(self) -> None:
        """SIGCONT."""
        os.kill(self._trainer.pid, signal.SIGCONT)

    # What is waited for.

    def wait_acknowledged(self, more: int = 4) -> None:
        """Until so many samples were acknowledged that were not before."""
        what = f"{more} more samples are acknowledged"
        self._wait_more(lambda: len(self.records.acknowledged), more, what)

    def wait_steps(self, more: int) -> None:
        """Until the policy has made so many steps more."""
        what = f"the policy makes {more} more steps"
        self._wait_more(lambda: len(self.records.steps), more, what)

    def _wait_more(self, count: Callable[[], int], more: int, what: str) -> None:
        self.records.refresh()
        aim = count() + more

        def reached() -> bool:
            self.records.refresh()
            return count() >= aim

        self.wait_for(reached, what)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds. Raises StalledError, as all that wait here do."""
        deadline = time.monotonic() + self._patience
        while not condition():
            for name, process in (("policy", self._policy), ("trainer", self._trainer)):
                code = None if process is None else process.exitcode
                assert code in (None, 0, -signal.SIGKILL), f"the {name} ended with {code}"
            if time.monotonic() > deadline:
                raise StalledError(f"not in {self._patience:g} s: {what}")
            time.sleep(_POLL)

    # What is looked at.

    def shared_file(self) -> int:
        """An open descriptor of the shared file that is in use; the caller closes it."""
        (name,) = self._open_files(self._trainer.pid)
        opened = Path(f"/proc/{self._trainer.pid}/fd").iterdir()
        first, *_ = [path for path in opened if _link(path) == name]
        return os.open(first, os.O_RDWR)

    @contextmanager
    def other_stream(self) -> Iterator[tuple[Stream, Sample]]:
        """A stream of the same run to the trainer, past the wire, and a sample of the policy's."""
        policy = json.loads((ARITHMETIC / "policy" / "config.json").read_text())
        sizes = ("hidden_size", "vocab_size", "num_hidden_layers")
        spec = pb.PolicySpec(**{name: policy[name] for name in sizes})
        states = load_file(self._home / processes.RECORDED)
        with open_channel(self._address) as channel:
            client = Client(channel)
            run = client.open(RUN, spec)
            layers = tuple(run.aux_layers)
            sample = Sample.pack("recorded", run.latest_policy_version, 1.0, layers, **states)
            with Stream(client) as stream:
                yield stream, sample

    def audit(self) -> Audit:
        """The books, while the trainer is stopped, or is dead."""
        if not self._trainer.is_alive():
            return self._books.audit(sample_folder(self.registry))
        self.stop_trainer()
        try:
            return self._books.audit(sample_folder(self.registry))
        finally:
            self.continue_trainer()

    def leaked(self) -> int:
        """Files that the trainer holds beyond the one in use and those on offer."""

        def settled() -> bool:
            return len(self._open_files(self._trainer.pid)) <= 1

        try:
            self.wait_for(settled, "the files of streams that ended are gone")
        except StalledError:
            return len(self._open_files(self._trainer.pid)) - 1
        return 0

    def finish(self) -> tuple[Audit, tuple[int, int], list[str]]:
        """End both, when all that was acknowledged was trained on.

        Returns:
            The books; anchors that the weights have seen and should have seen; what is left in
            shared memory.
        """
        self.end_policy()
        with open_channel(self._address) as channel:
            stub = pb_grpc.DraftTrainerStub(channel)

            def drained() -> bool:
                status = stub.GetStatus(pb.GetStatusRequest(), timeout=self._patience)
                return bool(status.idle) and not status.samples_pending

            self.wait_for(drained, "the trainer has trained on everything")
        self.end_trainer()
        left = [str(path) for path in self.memory.iterdir()]
        samples = sample_folder(self.registry)
        audit = self._books.audit(samples, drained=True)
        return audit, self._books.weights(self.registry, samples), left

    def stop(self) -> None:
        """End every process, and remove what they have in memory."""
        for process in (self._policy, self._trainer):
            if process is not None and process.is_alive():
                process.kill()
                process.join(self._patience)
        self.wire.close()
        for path in self.memory.iterdir():
            path.unlink()
        self.memory.rmdir()

    def _open_files(self, pid: int) -> set[str]:
        """The files of samples that it has open and whose names are gone: those of streams."""
        prefix = f"{self.memory}/slipstream-samples-"
        names = {_link(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        return {name for name in names if name.startswith(prefix) and name.endswith(_DELETED)}

    def _kill(self, process: Any) -> None:
        assert process.exitcode is None, f"it ended by itself, with {process.exitcode}"
        process.kill()
        process.join(self._patience)
        assert process.exitcode == -signal.SIGKILL, process.exitcode

    def _end(self, process: Any, name: str) -> None:
        assert process.exitcode is None, f"the {name} ended by itself, with {process.exitcode}"
        process.terminate()
        process.join(self._patience)
        assert process.exitcode == 0, f"the {name} ended with {process.exitcode}"


class StalledError(AssertionError):
    """Something that should have happened did not, in all the time that there was."""


def _is_stopped(pid: int) -> bool:
    """Return whether all of its threads are stopped or have ended."""
    return all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir())


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""
