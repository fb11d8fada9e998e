"""The bridge's own shipper before a real trainer, without a policy: samples are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from draft_trainer.sample import Sample as Kept
from draft_trainer.server.app import TrainerServer
from policy_bridge.config import BridgeConfig
from policy_bridge.connection import Shipper
from policy_bridge.outbox import Outbox, Sample
from policy_bridge.stats import BridgeStats, Counters
from slipstream.client import open_channel
from slipstream.sample import PackedTensors
from tests.draft_trainer.rig import DEADLINE, LAYERS, SPEC
from tests.draft_trainer.synthetic import VOCAB, Policy

RUN = "run"


def samples(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Sample]:
    """Rollouts of the synthetic policy, as the bridge holds them; each of 16 tokens or so."""
    return [
        Sample.of(
            sample.sample_id,
            1,
            sample.temperature,
            LAYERS,
            PackedTensors(
                token_ids=sample.token_ids.int(),
                positions=sample.positions.int(),
                segment_ids=torch.empty(0, dtype=torch.int32),
                sampled_logprobs=sample.sampled_logprobs,
                sampled_logits=sample.sampled_logits,
                loss_mask=sample.loss_mask,
                aux=sample.aux.to(dtype),
                final=sample.final_hidden.to(dtype),
                scales=torch.empty(0),
            ),
        )
        for sample in Policy().samples(count, seed)
    ]


def with_tensors(sample: Sample, **changes: torch.Tensor) -> Sample:
    """The sample with other tensors, by their names in ``PackedTensors``."""
    tensors = replace(sample.tensors, **changes)  # type: ignore[arg-type]
    facts = (sample.sample_id, sample.policy_version, sample.temperature, sample.aux_layers)
    return Sample.of(*facts, tensors)


@dataclass
class Sender:
    """A shipper and its outbox."""

    shipper: Shipper
    outbox: Outbox
    counters: Counters

    def send(self, *given: Sample) -> None:
        for sample in given:
            assert self.outbox.offer(sample, DEADLINE)

    def flush(self) -> None:
        assert self.outbox.wait_empty(DEADLINE)

    def stats(self) -> BridgeStats:
        return self.counters.snapshot(
            connected=self.shipper.connected,
            policy_version=1,
            outbox_samples=len(self.outbox),
            outbox_bytes=self.outbox.nbytes,
            last_sync=None,
        )


@contextmanager
def sending(address: str, connected: bool = True, **settings: Any) -> Iterator[Sender]:
    """A shipper that feeds the trainer at ``address``, whose run was announced before."""
    config = BridgeConfig(trainer=address, run_id=RUN, **{"max_backoff_seconds": 0.1, **settings})
    modules = SimpleNamespace(
        spec=lambda name: SPEC, layers=[None] * SPEC.num_hidden_layers, vocab_size=VOCAB
    )
    counters = Counters()
    outbox = Outbox(config.outbox_bytes, counters)
    channel = open_channel(address)
    shipper = Shipper(channel, modules, outbox, config, counters)  # type: ignore[arg-type]
    try:
        if connected:
            assert shipper.wait_connected(DEADLINE)
        yield Sender(shipper, outbox, counters)
    finally:
        shipper.stop()
        outbox.close()
        channel.close()
        assert shipper.join()


def kept(server: TrainerServer) -> dict[str, Kept]:
    """Everything that the trainer holds, by id."""
    run = server.runs.current
    assert run is not None
    found = [*run.held_out(), *run.draw(1 << 30).samples]
    return {sample.sample_id: sample for sample in found}


def assert_same(kept_sample: Kept, sent: Sample) -> None:
    """Every tensor has the bits that were sent."""
    tensors = sent.tensors
    pairs = {
        "token_ids": tensors.token_ids,
        "positions": tensors.positions,
        "loss_mask": tensors.loss_mask,
        "aux": tensors.aux,
        "final_hidden": tensors.final,
        "sampled_logprobs": tensors.sampled_logprobs,
        "sampled_logits": tensors.sampled_logits,
    }
    for name, tensor in pairs.items():
        own = getattr(kept_sample, name)
        assert own.dtype == tensor.dtype and torch.equal(own, tensor), name
    assert kept_sample.segment_ids.unique().tolist() == [0]
