"""Makes policy versions known to the trainer before their first sample goes out.

The matrices were copied when the version was synced (``matrices``); they are hashed and
sent later, off the policy's thread and at a pace that it does not notice (``pacing``).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import grpc
import torch

from policy_bridge.pacing import BLOCK_BYTES, Pace
from policy_bridge.session import Session
from slipstream.framing import frame_chunk
from slipstream.refusal import RefusedError, refused_from
from slipstream.tensors import bytes_of, dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

_METHOD = pb.DESCRIPTOR.services_by_name["DraftTrainer"].methods_by_name["AnnouncePolicy"]
# For the pauses of hashing, and again for those of sending: of the deadline, and of the time from
# one sync to the next. A version must be known before the one after the next is there: samples
# were shed for want of it when syncs came faster than announcements.
_OF_DEADLINE, _OF_INTERVAL = 0.25, 0.125
# Before the second sync.
_FIRST_INTERVAL = 8.0

LM_HEAD = "lm_head.weight"
EMBED_TOKENS = "embed_tokens.weight"


@dataclass(frozen=True)
class PolicySnapshot:
    """What the trainer's teacher needs of one policy version, on CPU, in the policy's dtype.

    Attributes:
        policy_version: its number.
        tensors: ``lm_head.weight`` [draft_vocab, H] and ``embed_tokens.weight`` [vocab, H].
    """

    policy_version: int
    tensors: dict[str, torch.Tensor]


class Announcer:
    """Keeps the newest snapshots and announces each once per trainer that lacks it.

    Args:
        channel: to the trainer.
        keep: snapshots held, of two or more: the newest, and before it one that is being announced
            rather than one that waits. To a slow trainer each was given up before it was known,
            and not a sample went out.
    """

    def __init__(self, channel: grpc.Channel, keep: int = 2) -> None:
        # Not through the stub, which copies a chunk five times under the interpreter's lock.
        self._call = channel.stream_unary(
            f"/{_METHOD.containing_service.full_name}/{_METHOD.name}",
            response_deserializer=pb.AnnouncePolicyResponse.FromString,
        )
        self._keep = keep
        self._lock = threading.Lock()
        self._snapshots: OrderedDict[int, PolicySnapshot] = OrderedDict()
        self._specs: dict[int, list[tensor_pb2.TensorSpec]] = {}
        self._offered_at: float | None = None
        self._interval = _FIRST_INTERVAL
        self._session: Session | None = None
        self._known: int | None = None
        self._announcing: int | None = None
        self._held_hashes: set[bytes] = set()

    def offer(self, snapshot: PolicySnapshot) -> list[int]:
        """Take the newest snapshot; the versions that were dropped without being announced."""
        now = time.monotonic()
        with self._lock:
            if self._offered_at is not None:
                self._interval = now - self._offered_at
            self._offered_at = now
            self._snapshots[snapshot.policy_version] = snapshot
            dropped = []
            while len(self._snapshots) > self._keep:
                version = next(kept for kept in self._snapshots if kept != self._announcing)
                del self._snapshots[version]
                self._specs.pop(version, None)
                if not self._knows(version):
                    dropped.append(version)
            return dropped

    def open_session(self, session: Session, forget: bool) -> None:
        """Start over with a (possibly new) trainer process; ``forget`` drops the snapshots."""
        with self._lock:
            if forget:
                self._snapshots.clear()
                self._specs.clear()
            self._session = session
            self._known = session.latest_policy_version
            self._held_hashes.clear()

    def due(self, up_to: int | None = None) -> int | None:
        """The oldest version to announce, at most ``up_to``; None if there is none."""
        with self._lock:
            for version in sorted(self._snapshots):
                if not self._knows(version) and (up_to is None or version <= up_to):
                    return version
            return None

    def knows(self, version: int) -> bool:
        """Whether the trainer has been told of ``version`` or of a later one."""
        with self._lock:
            return self._knows(version)

    def announce(self, version: int, timeout: float) -> None:
        """Tell the trainer of one version: its matrices, where it lacks one of that content.

        Args:
            version: that is due.
            timeout: seconds for sending it; half of that more for hashing it and sending again.

        Raises:
            grpc.RpcError: refused or failed.
        """
        with self._lock:
            session, snapshot = self._session, self._snapshots.get(version)
            specs = self._specs.get(version)
            pauses = min(timeout * _OF_DEADLINE, self._interval * _OF_INTERVAL)
            if session is None or snapshot is None:
                raise RefusedError("policy_version", version, "a version that is due", "call due()")
            self._announcing = version
        try:
            self._tell(session, snapshot, specs, timeout, pauses)
        finally:
            with self._lock:
                self._announcing = None

    def _tell(
        self,
        session: Session,
        snapshot: PolicySnapshot,
        specs: list[tensor_pb2.TensorSpec] | None,
        timeout: float,
        pauses: float,
    ) -> None:
        version = snapshot.policy_version
        if specs is None:
            specs = _specs_of(snapshot.tensors, pauses)
        header = pb.AnnouncePolicyHeader(
            session_id=session.session_id, policy_version=version, tensors=specs
        )
        names = {spec.name for spec in specs if spec.sha256 not in self._held_hashes}
        try:
            self._send(header, snapshot, names, timeout, pauses)
        except grpc.RpcError as error:
            if refused_from(error) is None or len(names) == len(specs):
                raise
            # The trainer may have let go of a tensor that it had: send all of them.
            self._send(header, snapshot, set(snapshot.tensors), timeout, pauses)
        with self._lock:
            self._held_hashes.update(spec.sha256 for spec in specs)
            self._known = version
            if version in self._snapshots:
                self._specs[version] = specs

    def _send(
        self,
        header: pb.AnnouncePolicyHeader,
        snapshot: PolicySnapshot,
        names: set[str],
        timeout: float,
        pauses: float,
    ) -> None:
        sent = {name: bytes_of(snapshot.tensors[name]) for name in names}

        def requests() -> Iterator[bytes]:
            yield pb.AnnouncePolicyRequest(header=header).SerializeToString()
            # Of gRPC's thread, which does its own work on a request before it asks for the next.
            pace = Pace(sum(map(len, sent.values())), pauses)
            for name, data in sent.items():
                for offset in range(0, len(data), BLOCK_BYTES):
                    yield frame_chunk(name, offset, data[offset : offset + BLOCK_BYTES])
                    pace.rest()

        self._call(requests(), timeout=timeout)

    def give_up(self, version: int) -> None:
        """Drop a version that the trainer will not take."""
        with self._lock:
            self._snapshots.pop(version, None)
            self._specs.pop(version, None)

    def _knows(self, version: int) -> bool:
        return self._known is not None and version <= self._known


def _specs_of(tensors: Mapping[str, torch.Tensor], pauses: float) -> list[tensor_pb2.TensorSpec]:
    contents = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    pace = Pace(sum(map(len, contents.values())), pauses)
    specs = []
    for name, data in contents.items():
        digest = hashlib.sha256()
        for offset in range(0, len(data), BLOCK_BYTES):
            digest.update(data[offset : offset + BLOCK_BYTES])
            pace.rest()
        tensor = tensors[name]
        specs.append(
            tensor_pb2.TensorSpec(
                name=name,
                dtype=dtype_to_wire(tensor.dtype),
                shape=list(tensor.shape),
                sha256=digest.digest(),
            )
        )
    return specs
