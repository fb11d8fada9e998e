"""A stream beside the bridge's: it sends again what was sent before, or what is damaged."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file

from policy_bridge.session import Session, decode_session
from policy_bridge.stream import StateStream
from slipstream.client import open_channel
from slipstream.sample import Sample
from slipstream.tensors import SCHEMA_VERSION, checksum_of
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc


class OtherSender:
    """One stream of the same run, inline over gRPC; ``close`` ends it.

    Args:
        address: of the trainer.
        run_id: of the run.
        policy: the policy's config.json, read.
        recorded: a sample that the policy wrote.
        patience: seconds for every answer.
    """

    def __init__(
        self, address: str, run_id: str, policy: dict[str, Any], recorded: Path, patience: float
    ) -> None:
        self._patience = patience
        self._acks: queue.SimpleQueue[pb.Ack] = queue.SimpleQueue()
        self._channel = open_channel(address)
        session = self._open_run(run_id, policy)
        header = pb.StreamHeader(session_id=session.session_id)
        self._stream = StateStream(self._channel, header, lambda why: None, self._answered)
        self.sample = _read(recorded, session)

    def send(self, sample: Sample, damage: bool = False) -> pb.Ack:
        """Send one sample and wait for its answer.

        Args:
            sample: of the run.
            damage: flip a bit of its states after its checksum was taken.
        """
        block = sample.block.numpy().copy()
        assert self._stream.wait_credit((1 << 12) + len(block), self._patience), "no credit"
        request = pb.StreamStatesRequest()
        header = request.batch.samples.add()
        header.CopyFrom(sample.header)
        header.packed.checksum = checksum_of(block)
        header.packed.span.CopyFrom(pb.Span(memory=pb.MEMORY_PAYLOAD, bytes=len(block)))
        if damage:
            block[len(block) // 2] ^= 1
        self._stream.send(request, [block])
        return self._acks.get(timeout=self._patience)

    def named(self, name: str) -> Sample:
        """The recorded sample under another id."""
        return self.sample.repacked(sample_id=name)

    def close(self) -> None:
        """End the stream."""
        self._stream.close(self._patience)
        self._channel.close()

    def _answered(self, batch: pb.AckBatch) -> None:
        for ack in batch.acks:
            self._acks.put(ack)

    def _open_run(self, run_id: str, policy: dict[str, Any]) -> Session:
        layers, vocabulary = policy["num_hidden_layers"], policy["vocab_size"]
        spec = pb.PolicySpec(
            hidden_size=policy["hidden_size"], vocab_size=vocabulary, num_hidden_layers=layers
        )
        response = pb_grpc.DraftTrainerStub(self._channel).OpenRun(
            pb.OpenRunRequest(
                run_id=run_id, policy=spec, client="faults", schema_version=SCHEMA_VERSION
            ),
            timeout=self._patience,
        )
        modules = SimpleNamespace(layers=[None] * layers, vocab_size=vocabulary)
        return decode_session(response, modules)  # type: ignore[arg-type]


def _read(path: Path, session: Session) -> Sample:
    assert session.latest_policy_version is not None
    version = session.latest_policy_version
    return Sample.pack("recorded", version, 1.0, session.aux_layers, **load_file(path))
