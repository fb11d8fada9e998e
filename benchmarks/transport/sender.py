"""The sending side: the bridge's own outbox and connection, given samples instead of a policy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from types import SimpleNamespace

from benchmarks.transport.case import RUN, VOCAB
from benchmarks.transport.process import Process
from policy_bridge.config import BridgeConfig
from policy_bridge.connection import Connection
from policy_bridge.outbox import Outbox
from policy_bridge.stats import Counters
from slipstream.client import open_channel
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb

DEADLINE = 120.0
_OUTBOX_BYTES = 4 << 30
_PREFIXES = itertools.count()


def _named(sample: Sample, name: str) -> Sample:
    header = pb.VerifierStates()
    header.CopyFrom(sample.header)
    header.sample_id = name
    return Sample(header, sample.block)


class Sender:
    """One open stream to the receiver.

    Args:
        receiver: the process with the trainer, whose address it prints first.
        hidden_size: H.
        transport: of ``BridgeConfig``.
    """

    def __init__(
        self,
        receiver: Process,
        hidden_size: int,
        transport: str,
    ) -> None:
        address = receiver.addresses[0]
        config = BridgeConfig(
            trainer=address, run_id=RUN, transport=transport, outbox_bytes=_OUTBOX_BYTES
        )
        spec = pb.PolicySpec(hidden_size=hidden_size, vocab_size=VOCAB, num_hidden_layers=36)
        modules = SimpleNamespace(spec=lambda name: spec, layers=[None] * 36, vocab_size=VOCAB)
        self._counters = Counters()
        self._outbox = Outbox(config.outbox_bytes, self._counters)
        self._channel = open_channel(address)
        self._connection = Connection(
            self._channel,
            modules,  # type: ignore[arg-type]
            self._outbox,
            config,
            self._counters,
        )
        if not self._connection.wait_connected(DEADLINE):
            raise RuntimeError("no run was opened")
        self._receiver = receiver

    def send(self, samples: Sequence[Sample], count: int) -> tuple[float, float, float]:
        """Send ``count`` samples, repeating ``samples`` under ids of their own.

        Returns:
            Seconds from the first one's offer to the last one's acknowledgement, and CPU seconds
            meanwhile of this process and of the receiver.
        """
        prefix = f"r{next(_PREFIXES)}"
        named = [
            _named(sample, f"{prefix}-{number}")
            for number, sample in zip(range(count), itertools.cycle(samples), strict=False)
        ]
        accepted = self._accepted()
        receiver_cpu = self._receiver.cpu_seconds()
        own_cpu, started = time.process_time(), time.perf_counter()
        for sample in named:
            if not self._outbox.put(sample, DEADLINE):
                raise RuntimeError("the outbox refused a sample")
        if not self._outbox.wait_empty(DEADLINE):
            raise RuntimeError("not everything was acknowledged in time")
        seconds = time.perf_counter() - started
        own_cpu = time.process_time() - own_cpu
        receiver_cpu = self._receiver.cpu_seconds() - receiver_cpu
        if self._accepted() - accepted != count:
            raise RuntimeError("a sample was refused or taken for a duplicate")
        return seconds, own_cpu, receiver_cpu

    def transport(self) -> str:
        """How the states travel."""
        return self._stats().transport

    def close(self) -> None:
        """End the stream."""
        self._connection.stop()
        self._outbox.close()
        self._channel.close()
        if not self._connection.join():
            raise RuntimeError("the connection did not end")

    def _accepted(self) -> int:
        return self._stats().accepted

    def _stats(self):  # type: ignore[no-untyped-def]
        return self._counters.snapshot(
            connected=True, policy_version=None, outbox_samples=0, outbox_bytes=0, last_sync=None
        )
