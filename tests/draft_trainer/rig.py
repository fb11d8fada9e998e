"""A trainer in this process, fed over the real wire with the synthetic policy's states."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch

from draft_trainer.config import TrainerConfig
from draft_trainer.config_file import parse_config
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.server.app import TrainerServer
from slipstream.client import open_channel
from slipstream.errors import RefusedError, refused_from
from slipstream.sample import Sample
from slipstream.serving.identity import Access, TokenFiles
from slipstream.tensors import (
    SCHEMA_VERSION,
    bytes_of,
    checksum_of,
    chunks_of,
    difference,
    digest,
    spec_of,
)
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy, draft_vocab_ids, head

DEADLINE = 180.0
LAYERS = (2, 4, 5)
SPEC = pb.PolicySpec(
    hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=8, model_name="synthetic"
)


def open_to_all() -> Access:
    """Asks nothing of anybody."""
    return Access(None, TokenFiles({}, ""), {})


def write_draft(folder: Path, seed: int = 0) -> Path:
    """A random draft checkpoint with a reduced vocabulary."""
    folder.mkdir(parents=True)
    model = head(seed)
    Eagle3().save(folder, model)
    return folder


def raw_config(tmp_path: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small configuration on free ports; ``sections`` override."""
    initial = tmp_path / "initial"
    if not initial.exists():
        write_draft(initial)
    raw: dict[str, Any] = {
        "server": {"port": 0, "metrics_port": 0, "shutdown_timeout_s": 60.0},
        "draft": {"initial": str(initial), "registry": str(tmp_path / "registry")},
        "replay": {
            "directory": str(tmp_path / "samples"),
            "capacity_bytes": 1 << 22,
            "held_out_fraction": 0.25,
            "max_policy_lag": 2,
        },
        "training": {
            **{"ttt_steps": 3, "learning_rate": 0.01, "warmup_steps": 2, "weight_averaging": 0.0},
        },
        "gate": {"min_anchors": 20},
        # Nothing generates here, so nothing could pay.
        "economy": {"mode": "always"},
        "publish": {"num_speculative_tokens": 3, "state_timeout_s": 20.0},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return raw


def make_config(tmp_path: Path, **sections: dict[str, Any]) -> TrainerConfig:
    """``raw_config``, checked."""
    return parse_config(raw_config(tmp_path, **sections))


@contextmanager
def running(config: TrainerConfig, train: bool = True) -> Iterator[tuple[TrainerServer, Client]]:
    """A serving trainer and a client of it; ``train=False`` leaves the training thread out."""
    server = TrainerServer(config)
    if not train:
        server.loop.start = lambda: None  # type: ignore[method-assign]
    server.start()
    try:
        with open_channel(server.address) as channel:
            yield server, Client(channel)
    finally:
        assert server.stop()


@contextmanager
def feeding(config: TrainerConfig, train: bool = True) -> Iterator[tuple[TrainerServer, Client]]:
    """``running``, with a run that is open and its policy version 1 announced."""
    with running(config, train) as (server, client):
        client.open()
        client.announce(1)
        yield server, client


def matrices(policy: Policy) -> dict[str, torch.Tensor]:
    """Return what a bridge announces of a synthetic policy."""
    rows = policy.lm_head[draft_vocab_ids()]
    return {"lm_head.weight": rows, "embed_tokens.weight": policy.embed}


class Client:
    """A client that does what the bridge does, one call at a time."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub = pb_grpc.DraftTrainerStub(channel)
        self.session_id = ""

    def open(self, run_id: str = "run", policy: pb.PolicySpec = SPEC) -> pb.OpenRunResponse:
        response = self.stub.OpenRun(
            pb.OpenRunRequest(
                run_id=run_id, policy=policy, client="test", schema_version=SCHEMA_VERSION
            ),
            timeout=DEADLINE,
        )
        self.session_id = response.session_id
        return response

    def announce(
        self,
        version: int,
        policy: Policy | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
        send: Sequence[str] | None = None,
        before: Policy | None = None,
    ) -> pb.AnnouncePolicyResponse:
        """Announce ``policy``; only the tensors named in ``send`` go over the wire (None: all).

        As differences from ``before``, if that is given.
        """
        tensors = tensors or matrices(policy or Policy())
        header = pb.AnnouncePolicyHeader(
            session_id=self.session_id,
            policy_version=version,
            tensors=[spec_of(name, tensor) for name, tensor in tensors.items()],
        )
        sent = {n: t for n, t in tensors.items() if send is None or n in send}
        chunks = list(chunks_of(sent))
        old = matrices(before) if before is not None else {}
        for chunk in chunks if old else ():
            header.bases[chunk.name] = digest(old[chunk.name])
            chunk.data = difference(memoryview(chunk.data), bytes_of(old[chunk.name]))
        requests = [pb.AnnouncePolicyRequest(header=header)]
        requests += [pb.AnnouncePolicyRequest(chunk=chunk) for chunk in chunks]
        return self.stub.AnnouncePolicy(iter(requests), timeout=DEADLINE)

    def send(self, *samples: Sample | pb.StreamStatesRequest) -> list[pb.Ack]:
        """One stream that sends ``samples`` within its credits and waits for every answer."""
        with Stream(self) as stream:
            return [stream.send(sample) for sample in samples]

    def status(self) -> pb.TrainerStatus:
        return self.stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE)

    def wait_for(self, condition: Any) -> pb.TrainerStatus:
        """The first status of which ``condition(status)`` holds."""
        deadline = time.monotonic() + DEADLINE
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"not in time: {status}"
            time.sleep(0.02)
        return status

    def prepare(self, version: int = 1) -> pb.PublishResult:
        return self.stub.PrepareSync(
            pb.PrepareSyncRequest(session_id=self.session_id, policy_version=version),
            timeout=DEADLINE,
        )

    def complete(self, version: int = 1, stage_id: str = "") -> pb.PublishResult:
        request = pb.CompleteSyncRequest(
            session_id=self.session_id, policy_version=version, policy_stage_id=stage_id
        )
        return self.stub.CompleteSync(request, timeout=DEADLINE)

    def promote(self, version: int, pin: bool = False) -> pb.PublishResult:
        return self.stub.PromoteRelease(
            pb.PromoteReleaseRequest(draft_version=version, pin=pin), timeout=DEADLINE
        )

    def roll_back(self) -> pb.PublishResult:
        return self.stub.RollBackRelease(pb.RollBackReleaseRequest(), timeout=DEADLINE)


class Stream:
    """An open StreamStates call."""

    def __init__(self, client: Client, session_id: str | None = None) -> None:
        self._requests: queue.SimpleQueue[pb.StreamStatesRequest | None] = queue.SimpleQueue()
        session_id = client.session_id if session_id is None else session_id
        self.put(pb.StreamStatesRequest(header=pb.StreamHeader(session_id=session_id)))
        self.call = client.stub.StreamStates(iter(self._requests.get, None), timeout=DEADLINE)
        self.credit = 0

    def __enter__(self) -> Stream:
        self.credit += self._next("credit").credit.bytes
        first = self._next("acks").acks
        assert not first.acks
        self.wanted_tokens = first.wanted_tokens
        return self

    def __exit__(self, *exc: object) -> None:
        self._requests.put(None)
        self.call.cancel()

    def put(self, request: pb.StreamStatesRequest) -> None:
        self._requests.put(request)

    def send(self, sample: Sample | pb.StreamStatesRequest) -> pb.Ack:
        """Send one sample and take its answer and its credit."""
        request = request_of(sample) if isinstance(sample, Sample) else sample
        self.credit -= request.ByteSize()
        self.put(request)
        # One without acks says that other tokens are wanted than before.
        while not (answer := self._next("acks").acks).acks:
            pass
        self.credit += answer.credit_bytes
        self.wanted_tokens = answer.wanted_tokens
        (ack,) = answer.acks
        return ack

    def finish(self) -> None:
        """Nothing more to send; returns when the trainer has ended the call."""
        self._requests.put(None)
        assert not [each for each in self.call if each.acks.acks]

    def _next(self, kind: str) -> pb.StreamStatesResponse:
        response = next(self.call)
        assert response.WhichOneof("kind") == kind
        return response


def rollouts(count: int, seed: int = 0, version: int = 1) -> list[Sample]:
    """Samples of ``count`` rollouts of the default policy."""
    return [
        sample.repacked(policy_version=version) if version != 1 else sample
        for sample in Policy().samples(count, seed)
    ]


def request_of(sample: Sample) -> pb.StreamStatesRequest:
    """The message of one sample, its block inline and as it is now."""
    request = pb.StreamStatesRequest(batch=pb.SampleBatch(samples=[sample.header]))
    block = sample.block.numpy()
    packed = request.batch.samples[0].packed
    packed.span.CopyFrom(pb.Span(memory=pb.MEMORY_PAYLOAD, bytes=len(block)))
    packed.checksum = checksum_of(block)
    request.payload = block.tobytes()
    return request


def refusal(call: Any) -> RefusedError:
    """The refusal that ``call()`` ends with."""
    try:
        answer = call()
        raise AssertionError(f"not refused: {answer}")
    except grpc.RpcError as error:
        refused = refused_from(error)
        assert refused is not None, f"no refusal in {error}"
        assert refused.code == error.code()  # type: ignore[attr-defined]
        return refused


def train(client: Client, seed: int, version: int = 1) -> pb.TrainerStatus:
    """Send 60 rollouts and wait until they were trained on and judged."""
    before = client.status()
    acks = client.send(*rollouts(60, seed, version))
    assert {ack.status for ack in acks} == {pb.ACK_STATUS_ACCEPTED}
    return client.wait_for(
        lambda s: s.idle and s.samples_pending == 0 and s.train_steps > before.train_steps
    )


def train_until_released(client: Client, version: int = 1, first_seed: int = 0) -> int:
    newest = client.status().newest_release
    for seed in range(first_seed, first_seed + 40):
        status = train(client, seed, version)
        if status.newest_release > newest:
            return int(status.newest_release)
    raise AssertionError(f"no candidate passed: {status.last_verdict.reason}")
