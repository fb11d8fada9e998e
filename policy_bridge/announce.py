"""Makes policy versions known to the trainer before their first sample goes out.

The matrices were copied when the version was synced (``matrices``); they are hashed and
sent later, off the policy's thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import torch

from policy_bridge.session import Session
from slipstream.refusal import RefusedError, refused_from
from slipstream.tensors import chunks_of, spec_of
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2

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
        stub: the trainer.
        keep: snapshots held; an older one that nobody announced is given up.
    """

    def __init__(self, stub: pb_grpc.DraftTrainerStub, keep: int = 2) -> None:
        self._stub = stub
        self._keep = keep
        self._lock = threading.Lock()
        self._snapshots: OrderedDict[int, PolicySnapshot] = OrderedDict()
        self._specs: dict[int, list[tensor_pb2.TensorSpec]] = {}
        self._session: Session | None = None
        self._known: int | None = None
        self._held_hashes: set[bytes] = set()

    def offer(self, snapshot: PolicySnapshot) -> list[int]:
        """Take the newest snapshot; the versions that were dropped without being announced."""
        with self._lock:
            self._snapshots[snapshot.policy_version] = snapshot
            dropped = []
            while len(self._snapshots) > self._keep:
                version, _ = self._snapshots.popitem(last=False)
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
        """Tell the trainer of one version.

        Raises:
            grpc.RpcError: refused or failed.
        """
        with self._lock:
            session, snapshot = self._session, self._snapshots.get(version)
            specs = self._specs.get(version)
        if session is None or snapshot is None:
            raise RefusedError("policy_version", version, "a version that is due", "call due()")
        if specs is None:
            specs = [spec_of(name, tensor) for name, tensor in snapshot.tensors.items()]
        header = pb.AnnouncePolicyHeader(
            session_id=session.session_id, policy_version=version, tensors=specs
        )
        names = {spec.name for spec in specs if spec.sha256 not in self._held_hashes}
        try:
            self._send(header, snapshot, names, timeout)
        except grpc.RpcError as error:
            if refused_from(error) is None or len(names) == len(specs):
                raise
            # The trainer may have let go of a tensor that it had: send all of them.
            self._send(header, snapshot, set(snapshot.tensors), timeout)
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
    ) -> None:
        def requests() -> Iterator[pb.AnnouncePolicyRequest]:
            yield pb.AnnouncePolicyRequest(header=header)
            for chunk in chunks_of({n: t for n, t in snapshot.tensors.items() if n in names}):
                yield pb.AnnouncePolicyRequest(chunk=chunk)

        self._stub.AnnouncePolicy(requests(), timeout=timeout)

    def give_up(self, version: int) -> None:
        """Drop a version that the trainer will not take."""
        with self._lock:
            self._snapshots.pop(version, None)
            self._specs.pop(version, None)

    def _knows(self, version: int) -> bool:
        return self._known is not None and version <= self._known
