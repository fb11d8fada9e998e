"""Same-host transports of states, end to end.

``python -m benchmarks.transport [--json PATH] [--rounds N] [--quick]``. Two processes: the bridge's
outbox and shipper send, a whole trainer receives, validates and stores. With two cores each process
has one. Everything is measured in turn in every round: one memcpy, one read pass with checksum and
finiteness, a bare gRPC bytes stream of the same message size, both transports. The bare stream goes
to a plain process, and once more to the trainer's ("kept": it keeps freed memory, which helps any
stream), where it copies and checks nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.harness import machine
from benchmarks.transport.case import Case, make_samples
from benchmarks.transport.floors import (
    bare_seconds,
    copy_rate,
    memory_for,
    messages_of,
    plain_read_rate,
    read_rate,
    states_of,
)
from benchmarks.transport.process import Process
from benchmarks.transport.report import Measured, table, targets, to_dict
from benchmarks.transport.sender import Sender
from policy_bridge.outbox import Sample
from slipstream.checksum import KINDS
from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.v1 import draft_trainer_pb2 as pb

MEMORY_BYTES = 192 << 20
REPLAY_BYTES = 256 << 20
SMALL_REPLAY_BYTES = 16 << 20
"""Of the largest samples more than two: the bridge writes one while the trainer reads another."""

LARGE = [Case(4096, tokens, 512 << 20) for tokens in (32, 256, 1024)]
SMALL = [Case(64, tokens, (2 << 20) * tokens) for tokens in (4, 16)]


def one_round(
    measured: Measured,
    receiver: Process,
    bare: Process,
    senders: dict[str, Sender],
    samples: list[Sample],
    messages: list[bytes],
) -> None:
    """Everything once; bare and inline send less, being slower."""
    case, sources = measured.case, states_of(samples)
    copied = copy_rate(sources, memory_for(samples))
    read = read_rate(sources)
    measured.add("rates", "memcpy", copied)
    measured.add("rates", "read", read)
    measured.add("rates", "floor", 1.0 / (1.0 / copied + 1.0 / read))
    plain = plain_read_rate(sources)
    measured.add("rates", "plain", 1.0 / (1.0 / copied + 1.0 / plain))
    fewer = max(4, case.count // 4) if case.sample_bytes >= 1 << 20 else case.count
    size = samples[0].layout.nbytes
    for name, process in (("bare", bare), ("kept", receiver)):
        receiver_cpu, own_cpu = process.cpu_seconds(), time.process_time()
        seconds = bare_seconds(process.addresses[-1], messages, fewer, MAX_MESSAGE_BYTES)
        own_cpu = time.process_time() - own_cpu
        receiver_cpu = process.cpu_seconds() - receiver_cpu
        measured.add("rates", name, fewer * size / seconds)
        measured.add("cpu", f"{name} sender", own_cpu / (fewer * size / 1e9))
        measured.add("cpu", f"{name} receiver", receiver_cpu / (fewer * size / 1e9))
    for name, sender in senders.items():
        count = fewer if name == "inline" else case.count
        seconds, own, others = sender.send(samples, count)
        measured.add("rates", name, count * size / seconds)
        measured.add("microseconds", name, seconds / count * 1e6)
        measured.add("cpu", f"{name} sender", own / (count * size / 1e9))
        measured.add("cpu", f"{name} receiver", others / (count * size / 1e9))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds of an eighth")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[0]})
    rounds = 3 if options.quick else options.rounds
    results: dict[str, list[Measured]] = {"large": [], "small": []}
    for kind, cases in (("large", LARGE), ("small", SMALL)):
        for case in cases:
            if options.quick:
                case = dataclasses.replace(case, round_bytes=case.round_bytes // 8)
            with ExitStack() as stack:
                core = cores[-1] if len(cores) > 1 else None
                replay_bytes = REPLAY_BYTES if kind == "large" else SMALL_REPLAY_BYTES
                argv = [f"--hidden-size={case.hidden_size}", f"--replay-bytes={replay_bytes}"]
                argv = ["benchmarks.transport.receiver", *argv]
                receiver = stack.enter_context(Process(argv, core))
                bare = stack.enter_context(Process(["benchmarks.transport.bare"], core))
                senders = {}
                for name, transport in (("ring", "auto"), ("inline", "grpc")):
                    senders[name] = Sender(receiver, case.hidden_size, transport)
                    stack.callback(senders[name].close)
                assert senders["ring"].transport() == "shared_memory"
                samples = make_samples(case, MEMORY_BYTES)
                # Touches the pages of the replay buffer, and warms both streams.
                senders["ring"].send(samples, 2 * replay_bytes // case.sample_bytes)
                senders["inline"].send(samples, 4)
                messages = messages_of(samples)
                measured = Measured(case)
                for _ in range(rounds):
                    one_round(measured, receiver, bare, senders, samples, messages)
            results[kind].append(measured)
            print(table(measured), flush=True)
    print(f"\nchecksum: {pb.ChecksumKind.Name(KINDS[0])}; cores: {len(cores)}")
    found = targets(results["large"], results["small"])
    for target in found:
        verdict = "met   " if target.ok else "MISSED"
        print(f"{verdict}  {target.name}: {target.value:.3f} ({target.bound})")
    if options.json:
        figures = {
            "machine": machine(),
            "checksum": pb.ChecksumKind.Name(KINDS[0]),
            "rounds": rounds,
            **{kind: [to_dict(m) for m in measured] for kind, measured in results.items()},
            "targets": [dataclasses.asdict(target) for target in found],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
