# ruff: noqa: N802
"""In-process servers that speak the real wire, with the failures that the tests need."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

import grpc
import numpy as np
import torch

from draft_trainer.ingest.policies import receive_matrices
from examples.arithmetic_grpo.processes import free_port
from slipstream.errors import RefusedError, abort_with
from slipstream.sample import Sample
from slipstream.serving.server import SERVER_OPTIONS
from slipstream.tensors import SCHEMA_VERSION, checksum_of, digest
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2

DEADLINE = 120.0


class Server(AbstractContextManager["Server"]):
    """A gRPC server for one servicer, on a free port or on a given one."""

    def __init__(self, add: Callable[[grpc.Server], None], port: int = 0) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=SERVER_OPTIONS)
        add(self._server)
        # Not one of the system's: a server that is back finds its port free. Nor one of those that
        # services have chosen and listen on later.
        port = port or free_port(range(28_000, 32_000))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        assert self.port
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        self._server.stop(grace=None).wait(DEADLINE)

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass
class FakeTrainer(pb_grpc.DraftTrainerServicer):
    """A draft trainer that keeps what it is sent.

    Switches: ``credit`` bytes granted at once (returned with each ack), ``ack`` off
    swallows samples without an answer, ``hang`` holds the named calls until ``release``.
    """

    layers: tuple[int, ...] = (2, 4, 5)
    vocab_ids: torch.Tensor = field(default_factory=lambda: torch.arange(0, 64, 2))
    max_tokens: int = 512
    credit: int = 64 << 20
    ack: bool = True
    wanted_tokens: int = 0
    refuse: Callable[[Sample], RefusedError | None] = lambda _: None
    refuse_run: RefusedError | None = None
    refuse_announcements: list[RefusedError] = field(default_factory=list)
    hang: set[str] = field(default_factory=set)
    rollout_servers: tuple[str, ...] = ()
    staging: list[pb.ServerOutcome] = field(default_factory=list)
    on_complete: Callable[[pb.CompleteSyncRequest], pb.PublishResult] = lambda _: pb.PublishResult()
    samples: dict[str, Sample] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    tensors: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    chunks_sent: dict[int, set[str]] = field(default_factory=dict)
    chunk_bytes: dict[int, int] = field(default_factory=dict)
    events: list[tuple[str, int]] = field(default_factory=list)
    overdrawn: int = 0
    received_bytes: int = 0
    schema_version: int = SCHEMA_VERSION
    sessions: int = 0
    history: int = 0
    joined: set[str] = field(default_factory=set)
    status: pb.TrainerStatus = field(default_factory=pb.TrainerStatus)
    specs: list[pb.PolicySpec] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE)

    def serve(self, port: int = 0) -> Server:
        return Server(lambda s: pb_grpc.add_DraftTrainerServicer_to_server(self, s), port)

    def _maybe_hang(self, call: str) -> None:
        with self.changed:
            self.events.append((call, -1))
            self.changed.notify_all()
        if call in self.hang:
            self.release.wait(DEADLINE)

    def OpenRun(self, request, context):  # type: ignore[no-untyped-def]
        self._maybe_hang("OpenRun")
        if self.refuse_run is not None:
            abort_with(self.refuse_run, context)
        self.sessions += 1
        self.specs.append(request.policy)
        if request.HasField("history"):
            self.joined.add(f"s{self.sessions}")
        return pb.OpenRunResponse(
            session_id=f"s{self.sessions}",
            aux_layers=self.layers,
            draft_vocab_ids=self.vocab_ids.tolist(),
            max_tokens_per_sample=self.max_tokens,
            latest_policy_version=max(self.tensors) if self.tensors else None,
            rollout_servers=self.rollout_servers,
            schema_version=self.schema_version,
        )

    def AnnouncePolicy(self, requests, context):  # type: ignore[no-untyped-def]
        self._maybe_hang("AnnouncePolicy")
        if self.refuse_announcements:
            with self.changed:
                refused = self.refuse_announcements.pop()
                self.changed.notify_all()
            abort_with(refused, context)
        header = next(requests).header
        if not header.tensors:
            with self.changed:
                self.events.append(("refused", header.policy_version))
                self.changed.notify_all()
                if header.policy_version in self.tensors:
                    return pb.AnnouncePolicyResponse(policy_version=header.policy_version)
            reason = release_pb2.REFUSAL_REASON_NOT_ANNOUNCED
            told = RefusedError("lead", "not known", "an announced version", "wait", reason=reason)
            if header.policy_version < max(self.tensors, default=0):
                told = RefusedError("policy_version", "older", "a newer one", "count up")
            abort_with(told, context)
        version, first = header.policy_version, header.session_id not in self.joined
        answer = pb.AnnouncePolicyResponse(policy_version=version, history=self.history)
        known = {} if first and version < max(self.tensors, default=-1) else self.tensors
        if version in known and all(
            digest(known[version][spec.name]) == spec.sha256 for spec in header.tensors
        ):
            self.joined.add(header.session_id)
            return answer
        if first and version <= max(self.tensors, default=-1):
            with self.changed:
                self.tensors = {v: kept for v, kept in self.tensors.items() if v < version}
                self.history += 1
                answer.history = self.history
        if version in self.tensors:
            told = RefusedError("policy_version", header.policy_version, "a new one", "count up")
            abort_with(told, context)
        held = {digest(one): one for kept in self.tensors.values() for one in kept.values()}
        chunks = [request.chunk for request in requests]
        nbytes = sum(len(chunk.data) for chunk in chunks)
        try:
            specs = {spec.name: spec for spec in header.tensors}
            tensors = receive_matrices(specs, header.bases, chunks, held.get)
        except RefusedError as error:
            abort_with(error, context)
        with self.changed:
            assert all(header.policy_version > v for v in self.tensors)
            self.tensors[header.policy_version] = tensors
            self.chunks_sent[header.policy_version] = {chunk.name for chunk in chunks}
            self.chunk_bytes[header.policy_version] = nbytes
            self.events.append(("announced", header.policy_version))
            self.joined.add(header.session_id)
            self.changed.notify_all()
        return answer

    def StreamStates(self, requests, context):  # type: ignore[no-untyped-def]
        assert next(requests).WhichOneof("kind") == "header"
        self._maybe_hang("StreamStates")
        left = self.credit
        yield pb.StreamStatesResponse(credit=pb.Credit(bytes=left, inline_because="it is a double"))
        for request in requests:
            assert request.WhichOneof("kind") == "batch"
            size = request.ByteSize()
            left -= size
            with self.changed:
                self.overdrawn += left < 0
                self.received_bytes += size
            acks = []
            for header in request.batch.samples:
                acks += self._take(received(header, request.payload))
            left += size
            if acks:
                yield pb.StreamStatesResponse(
                    acks=pb.AckBatch(acks=acks, credit_bytes=size, wanted_tokens=self.wanted_tokens)
                )

    def _take(self, sample: Sample) -> list[pb.Ack]:
        with self.changed:
            self.received.append(sample.sample_id)
            self.events.append(("sample", sample.policy_version))
            refusal = self.refuse(sample)
            if sample.policy_version not in self.tensors:
                refusal = RefusedError("policy_version", "unknown", "announced", "announce")
            again = sample.sample_id in self.samples
            if refusal is None:
                self.samples[sample.sample_id] = sample
            answer = self.ack
            self.changed.notify_all()
        if not answer:
            return []
        status = pb.ACK_STATUS_DUPLICATE if again else pb.ACK_STATUS_ACCEPTED
        if refusal is not None:
            status = pb.ACK_STATUS_REFUSED
        told = refusal and refusal.to_proto()
        return [pb.Ack(sample_id=sample.sample_id, status=status, refusal=told)]

    def GetStatus(self, request, context):  # type: ignore[no-untyped-def]
        self._maybe_hang("GetStatus")
        return self.status

    def PrepareSync(self, request, context):  # type: ignore[no-untyped-def]
        self._maybe_hang("PrepareSync")
        named = [pb.ServerOutcome(address=address) for address in self.rollout_servers]
        return pb.PublishResult(draft_version=7, servers=self.staging or named)

    def CompleteSync(self, request, context):  # type: ignore[no-untyped-def]
        self._maybe_hang("CompleteSync")
        return self.on_complete(request)

    def tensor(self, sample: Sample, name: str) -> torch.Tensor:
        found: torch.Tensor = getattr(sample, _NAMES.get(name, name))
        return found


_NAMES = {"aux_hidden_states": "aux", "final_hidden_state": "final_hidden"}


def received(header: pb.VerifierStates, payload: bytes) -> Sample:
    """The sample that a message describes, its block out of the payload."""
    packed = header.packed
    start = packed.span.offset
    assert packed.span.memory == pb.MEMORY_PAYLOAD
    block = np.frombuffer(payload[start : start + packed.span.bytes], np.uint8).copy()
    assert checksum_of(block) == packed.checksum
    sample = Sample(header, torch.from_numpy(block))
    assert sample.nbytes == packed.span.bytes
    return sample


class BlackHole:
    """An address that takes connections and never answers: a hung process."""

    def __enter__(self) -> str:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(16)
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._socket.close()
