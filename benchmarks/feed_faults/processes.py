"""The table's two processes: ``draft-trainer serve``, and forward passes through a real bridge.

What the policy knows is written as it happens, with one write each, so that kill -9 loses none of
it: every sample before it can be sent, every answer before the bridge hears of it, every step.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

# Imported here for the fork server: what the command would import first.
import draft_trainer.server.app  # noqa: F401
from draft_trainer.cli.main import main
from draft_trainer.files import written_whole
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.connection import Connection
from policy_bridge.outbox import Outbox
from slipstream.sample import TENSORS, Sample
from slipstream.v1 import draft_trainer_pb2 as pb

ROWS, PROMPT, SHORTEST, LONGEST = 2, 4, 8, 20
STEPS_PER_SYNC = 40
CAPTURED, ANSWERED, STEPS, VERSION = "captured", "answered", "steps", "version"
RECORDED = "recorded.safetensors"
PACE = 0.05
"""Seconds from one step's beginning to the next one's."""


@dataclass(frozen=True)
class Orders:
    """The instructions to the process at its start.

    Attributes:
        policy: folder of the model.
        folder: where it writes.
        seed: seed of its batches.
        bridge: its configuration.
    """

    policy: str
    folder: str
    seed: int
    bridge: BridgeConfig


def serve(config: str, log: str) -> None:
    """The trainer, with its output appended to ``log``. The process's whole life."""
    _log_to(Path(log))
    sys.exit(main(["serve", "--config", config]))


def train(orders: Orders) -> None:
    """Step until SIGTERM. The process's whole life."""
    folder = Path(orders.folder)
    _log_to(folder / "policy.log")
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: over.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        orders.policy, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    # Before the bridge's thread can have opened a stream.
    _Witness(folder)
    with PolicyBridge(model, orders.bridge) as bridge:
        steps = _Lines(folder / STEPS)
        generator = torch.Generator().manual_seed(orders.seed)
        count = 0
        while not over.is_set():
            began = time.monotonic()
            synced = 0.0
            stats = bridge.stats()
            # Off: the trainer came up after this version was synced.
            if count % STEPS_PER_SYNC == 0 or (stats.connected and stats.capture_off_reason):
                synced = _sync(bridge, folder)
            whole, own = _step(model, bridge, generator)
            steps.write(f"{whole:.4f} {own:.4f} {synced:.4f}")
            count += 1
            over.wait(max(0.0, began + PACE - time.monotonic()))
    sys.exit(0)


class _Lines:
    """A file of lines; each is there whole or not at all, whenever the process is killed."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *lines: str) -> None:
        os.write(self._number, "".join(f"{line}\n" for line in lines).encode())


class _Witness:
    """Wraps calls between the parts of this process's bridge, and records their arguments.

    SIGUSR1: the next answers are delivered twice.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._captured, self._answered = _Lines(folder / CAPTURED), _Lines(folder / ANSWERED)
        self._put, self._on_acks = Outbox.put, Connection._on_acks
        self._recorded = False
        self._twice = False
        signal.signal(signal.SIGUSR1, self._deliver_twice)
        # Functions: bound methods would not be given the outbox or the connection.
        Outbox.put = lambda *given: self.put(*given)  # type: ignore[method-assign]
        Connection._on_acks = lambda *given: self.on_acks(*given)  # type: ignore[method-assign]

    def put(self, outbox: Outbox, sample: Sample, priority: int = 0) -> bool:
        # Its anchors: see valid_targets in draft_trainer/drafters/loss.py.
        anchors = int(sample.loss_mask.sum()) - 1
        self._captured.write(f"{sample.sample_id} {anchors}")
        if not self._recorded:
            self._record(sample)
        return self._put(outbox, sample, priority)

    def on_acks(self, connection: Connection, batch: pb.AckBatch) -> None:
        self._answered.write(
            *(f"{ack.sample_id} {ack.status} {ack.refusal.field or '-'}" for ack in batch.acks)
        )
        self._on_acks(connection, batch)
        if self._twice:
            self._twice = False
            self._answered.write(*(f"{ack.sample_id} again -" for ack in batch.acks))
            self._on_acks(connection, batch)

    def _deliver_twice(self, number: int, frame: FrameType | None) -> None:
        self._twice = True

    def _record(self, sample: Sample) -> None:
        self._recorded = True
        tensors = {name: getattr(sample, name).clone() for name in TENSORS}
        with written_whole(self._folder / RECORDED) as temporary:
            temporary.write_bytes(save(tensors))


def _sync(bridge: PolicyBridge, folder: Path) -> float:
    """Seconds that a weight sync took; its version is higher than any before, over restarts."""
    path = folder / VERSION
    version = 1 + (int(path.read_text()) if path.exists() else 0)
    with written_whole(path) as temporary:
        temporary.write_text(str(version))
    clock = _Clock()
    with bridge.sync(version):
        pass
    return clock.seconds()


def _step(
    model: torch.nn.Module, bridge: PolicyBridge, generator: torch.Generator
) -> tuple[float, float]:
    """Seconds of a step's forward pass and what belongs to it; seconds of the bridge's calls."""
    tokens = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
    ids = torch.randint(3, 128, (ROWS, tokens), generator=generator)
    mask = torch.ones((ROWS, tokens), dtype=torch.bool)
    mask[:, :PROMPT] = False
    whole = _Clock()
    own = 0.0
    clock = _Clock()
    window = bridge.capture(forwards=1)
    taken = window.__enter__()
    own += clock.seconds()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    clock = _Clock()
    taken.ship(ids, loss_mask=mask)
    window.__exit__(None, None, None)
    own += clock.seconds()
    return whole.seconds(), own


class _Clock:
    """Seconds from now on, without those in which this thread could have run but for others."""

    def __init__(self) -> None:
        self._waited = _waited()
        self._began = time.monotonic()

    def seconds(self) -> float:
        return max(0.0, time.monotonic() - self._began - (_waited() - self._waited))


def _waited() -> float:
    # The second number: nanoseconds on a run queue. A machine that is busy is no stall.
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _log_to(path: Path) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(number, 1)
    os.dup2(number, 2)
