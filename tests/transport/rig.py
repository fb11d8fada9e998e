"""The bridge's own connection before a real trainer, without a policy: samples are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from draft_trainer.server.app import TrainerServer
from policy_bridge import connection as bridges
from policy_bridge.config import BridgeConfig
from policy_bridge.connection import Connection
from policy_bridge.outbox import Outbox
from policy_bridge.session import Announcer
from policy_bridge.stats import BridgeStats, Counters
from slipstream.client import open_channel
from slipstream.sample import TENSORS, Sample
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import DEADLINE, SPEC
from tests.draft_trainer.synthetic import Policy

RUN = "run"


def samples(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Sample]:
    """Rollouts of the synthetic policy; each of 16 tokens or so."""
    return [
        sample.repacked(aux=sample.aux.to(dtype), final_hidden=sample.final_hidden.to(dtype))
        for sample in Policy().samples(count, seed)
    ]


@dataclass
class Sender:
    """A connection and its outbox."""

    connection: Connection
    outbox: Outbox
    counters: Counters

    def send(self, *given: Sample) -> None:
        for sample in given:
            assert self.outbox.put(sample)

    def flush(self) -> None:
        assert self.outbox.wait_empty(DEADLINE)

    def stats(self) -> BridgeStats:
        return self.counters.snapshot(connected=self.connection.connected)


class Joined(Announcer):
    """The announcements of a process that has announced the run's version."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.history = 0


@contextmanager
def sending(
    address: str, connected: bool = True, spec: pb.PolicySpec = SPEC, **settings: Any
) -> Iterator[Sender]:
    """A connection that feeds the trainer at ``address``, whose run was opened before."""
    given = {"run_id": RUN, "max_backoff_seconds": 0.1, **settings}
    config = BridgeConfig(trainer=address, **given)
    modules = SimpleNamespace(
        spec=lambda name: spec,
        layers=[None] * spec.num_hidden_layers,
        vocab_size=spec.vocab_size,
    )
    counters = Counters()
    outbox = Outbox(config.bounds("cpu")[1], counters)
    channel = open_channel(address)
    with patch.object(bridges, "Announcer", Joined):
        connection = Connection(channel, modules, outbox, config, counters)  # type: ignore[arg-type]
    try:
        if connected:
            assert connection.wait_connected(DEADLINE)
        yield Sender(connection, outbox, counters)
    finally:
        connection.stop()
        outbox.close()
        channel.close()
        assert connection.join()


def deliver(address: str, given: Sequence[Sample], **settings: Any) -> BridgeStats:
    """Send samples until all were answered or shed; what became of them."""
    with sending(address, **settings) as sender:
        sender.send(*given)
        sender.flush()
        return sender.stats()


def kept(server: TrainerServer) -> dict[str, Sample]:
    """Everything that the trainer holds, by id."""
    run = server.runs.current
    assert run is not None
    found = [*run.held_out(), *run.draw(1 << 30).samples]
    return {sample.sample_id: sample for sample in found}


def assert_same(kept_sample: Sample, sent: Sample) -> None:
    """Every tensor has the bits that were sent."""
    for name in TENSORS:
        own, other = getattr(kept_sample, name), getattr(sent, name)
        assert own.dtype == other.dtype and torch.equal(own, other), name
