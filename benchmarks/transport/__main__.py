"""States from a bridge to a trainer on one host: shared memory, gRPC inline, and one memcpy.

The bridge's outbox and connection send, a whole trainer whose learner never starts receives,
validates and stores; each process has a core of its own where there are two. Time runs from the
first sample's offer to the last acknowledgement. In every round each contestant sends the same
samples once. No target is below 128 KiB: one token of an 8B policy is 32 KiB.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import (
    Target,
    finish,
    interleaved,
    options,
    ratios,
    say,
    spread,
    spread_text,
    table,
    write,
)
from benchmarks.transport.receiver import AUX_LAYERS, POLICY_VERSION, RUN, VOCAB
from benchmarks.workers import WorkerProcess
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.transport.rig import Sender, sending

HIDDEN = 4096
TOKENS = (4, 32, 256, 1024)
ROUND_BYTES = 256 << 20
REPLAY_BYTES = 256 << 20
OUTBOX_BYTES = 512 << 20
SHARED, INLINE, COPY = "shared memory", "gRPC inline", "memcpy"
SHARED_TO_INLINE = 2.0


@dataclass
class Measured:
    """One sample size; one value a round in every list.

    Attributes:
        nbytes: of a sample's block.
        count: samples a round.
        rates: bytes a second, by contestant.
        cpu: CPU seconds a GB of the sender and of the receiver, by contestant.
    """

    nbytes: int
    count: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The size of the states."""
        tokens = self.nbytes // (8 * HIDDEN)
        size = tokens * 8 * HIDDEN
        return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "sample_bytes": self.nbytes,
            "samples_per_round": self.count,
            "bytes_per_second": {name: spread(rates) for name, rates in self.rates.items()},
            "cpu_seconds_per_gb": self.cpu,
            "shared_to_inline": spread(ratios(self.rates[SHARED], self.rates[INLINE])),
            "shared_to_memcpy": spread(ratios(self.rates[SHARED], self.rates[COPY])),
        }


class Feed:
    """One open stream to the receiver."""

    def __init__(self, sender: Sender, receiver: WorkerProcess, name: str) -> None:
        self._sender, self._receiver, self._name = sender, receiver, name
        self._numbers = itertools.count()

    def send(self, samples: Sequence[Sample]) -> tuple[float, float, float]:
        """Send samples under new ids.

        Returns:
            Seconds from the first offer to the last acknowledgement, and CPU seconds of this
            process and of the receiver meanwhile.
        """
        named = [self._named(sample) for sample in samples]
        accepted = self._sender.stats().accepted
        receiver_cpu = self._receiver.ask("cpu")["seconds"]
        own_cpu, started = time.process_time(), time.perf_counter()
        self._sender.send(*named)
        self._sender.flush()
        seconds = time.perf_counter() - started
        own_cpu = time.process_time() - own_cpu
        receiver_cpu = self._receiver.ask("cpu")["seconds"] - receiver_cpu
        if self._sender.stats().accepted - accepted != len(samples):
            raise RuntimeError("a sample was refused or taken for a duplicate")
        return seconds, own_cpu, receiver_cpu

    def _named(self, sample: Sample) -> Sample:
        header = pb.VerifierStates()
        header.CopyFrom(sample.header)
        header.sample_id = f"{self._name}-{next(self._numbers)}"
        return Sample(header, sample.block)


def make_samples(tokens: int) -> list[Sample]:
    """Samples that together fill ``ROUND_BYTES``, so that no cache holds them."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, 4 * HIDDEN, generator=generator).to(torch.bfloat16)
    first = Sample.pack(
        "",
        POLICY_VERSION,
        1.0,
        AUX_LAYERS,
        token_ids=torch.arange(tokens) % VOCAB,
        positions=torch.arange(tokens),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        aux=states[:, HIDDEN:],
        final_hidden=states[:, :HIDDEN],
        # Of an lm_head of zeros.
        sampled_logprobs=torch.full((tokens,), -math.log(VOCAB)),
        sampled_logits=torch.zeros(tokens),
    )
    count = max(4, ROUND_BYTES // first.nbytes)
    return [Sample(first.header, first.block.clone()) for _ in range(count)]


def measure(tokens: int, rounds: int, core: int | None, log: Path) -> Measured:
    """All contestants with samples of one size."""
    samples = make_samples(tokens)
    found = Measured(samples[0].nbytes, len(samples))
    total = found.nbytes * found.count
    copies = [np.ones(found.nbytes, dtype=np.uint8) for _ in samples]

    def copy() -> None:
        started = time.perf_counter()
        for sample, destination in zip(samples, copies, strict=True):
            np.copyto(destination, sample.block.numpy()[: found.nbytes])
        found.rates.setdefault(COPY, []).append(total / (time.perf_counter() - started))

    with ExitStack() as stack:
        arguments = [f"--hidden-size={HIDDEN}", f"--replay-bytes={REPLAY_BYTES}"]
        receiver = stack.enter_context(
            WorkerProcess("receiver", "benchmarks.transport.receiver", arguments, log, core=core)
        )
        spec = pb.PolicySpec(hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=36)
        settings: dict[str, Any] = {"run_id": RUN, "outbox_bytes": OUTBOX_BYTES, "spec": spec}
        feeds = {}
        for name, mode in ((SHARED, "auto"), (INLINE, "grpc")):
            opened = sending(receiver.greeting["address"], transport=mode, **settings)
            feeds[name] = Feed(stack.enter_context(opened), receiver, name)

        def send(name: str) -> None:
            seconds, own, theirs = feeds[name].send(samples)
            found.rates.setdefault(name, []).append(total / seconds)
            found.cpu.setdefault(name, []).append((own / total * 1e9, theirs / total * 1e9))

        # Fills the store and touches all memory.
        for feed in feeds.values():
            feed.send(samples)
        interleaved(
            {COPY: copy, SHARED: lambda: send(SHARED), INLINE: lambda: send(INLINE)}, rounds
        )
    return found


def _cpu(sides: Sequence[tuple[float, float]]) -> str:
    own, theirs = (statistics.median(side) for side in zip(*sides, strict=True))
    return f"{own:.2f} + {theirs:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    parser = options("transport", (__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of every sample size")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[0]})
    core = cores[-1] if len(cores) > 1 else None
    results: list[Measured] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in TOKENS:
            result = measure(tokens, chosen.rounds, core, Path(folder) / "receiver.log")
            say(f"{result.label}: {chosen.rounds} rounds")
            results.append(result)
            value = statistics.median(ratios(result.rates[SHARED], result.rates[INLINE]))
            name = f"{result.label}: shared memory / gRPC inline"
            targets.append(Target.at_least(name, value, SHARED_TO_INLINE))
            write(chosen.json, {"sizes": [r.to_dict() for r in results]}, targets)
    rows = []
    for result in results:
        rates = {name: [r / 1e9 for r in values] for name, values in result.rates.items()}
        rows.append(
            [
                result.label,
                *(spread_text(rates[name]) for name in (COPY, SHARED, INLINE)),
                spread_text(ratios(rates[SHARED], rates[INLINE])),
                spread_text(ratios(rates[SHARED], rates[COPY])),
                *(_cpu(result.cpu[name]) for name in (SHARED, INLINE)),
            ]
        )
    columns = ["a sample", f"{COPY} GB/s", f"{SHARED} GB/s", f"{INLINE} GB/s"]
    columns += ["shared / inline", "shared / memcpy", "CPU s a GB, shared", "inline"]
    print(table("", columns, rows))
    return finish(chosen.json, {"sizes": [r.to_dict() for r in results]}, targets)


if __name__ == "__main__":
    sys.exit(main())
