"""An open run, and the policy versions announced in it before their first sample.

The trainer's answer to OpenRun is checked against the policy. When a version is synced, the
matrices that the trainer needs are copied; they are hashed and sent later, off the policy's thread
and in small blocks with pauses between them.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from policy_bridge.logits import is_sharded
from policy_bridge.model import PolicyModules, full_tensor
from policy_bridge.selection import bytes_per_token
from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.errors import OVERLOADED, RefusedError, refused_from
from slipstream.layers import check_layers
from slipstream.shortage import raise_unless_shortage
from slipstream.tensors import bytes_of, check_schema, difference, dtype_to_wire, frame_chunk
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

# Room in a message for everything that is not a state: ids, shapes, checksums.
_MESSAGE_OVERHEAD = 64 << 10


@dataclass(frozen=True)
class Session:
    """An open run.

    Attributes:
        session_id: goes with every later call.
        aux_layers: "after L layers" numbers to capture, ascending.
        draft_vocab_ids: int64 [draft_vocab], rows of lm_head to announce.
        max_tokens: longest sample the trainer takes.
        latest_policy_version: the highest it knows; None if none, and before this process has
            announced one: what is known then may be of the job that this one resumes.
        rollout_servers: host:port of each server that it publishes to.
    """

    session_id: str
    aux_layers: tuple[int, ...]
    draft_vocab_ids: torch.Tensor
    max_tokens: int
    latest_policy_version: int | None
    rollout_servers: tuple[str, ...]

    def same_shape(self, other: Session) -> bool:
        """Return whether states captured for one session fit the other."""
        return self.aux_layers == other.aux_layers and torch.equal(
            self.draft_vocab_ids, other.draft_vocab_ids
        )

    def max_sample_tokens(self, layers: int, hidden_size: int, dtype: torch.dtype) -> int:
        """Tokens that fit both the trainer's limit and a stream's credit, see ``bytes_per_token``.

        That is at least as many bytes as the longest sample has in bfloat16.
        """
        longest = self.max_tokens * bytes_per_token(layers, hidden_size, torch.bfloat16)
        most = max(MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD, longest)
        return min(self.max_tokens, most // bytes_per_token(layers, hidden_size, dtype))


def decode_session(
    response: pb.OpenRunResponse, policy: PolicyModules, joined: bool = False
) -> Session:
    """Check the trainer's answer to OpenRun, and return it as a ``Session``.

    Args:
        response: the answer.
        policy: the policy's parts.
        joined: whether this process has announced a policy version in the run.

    Raises:
        RefusedError: another schema version, layers the policy does not have, vocabulary ids
            that are missing, out of range or not ascending, or a limit below any sample.
    """
    step = "install the same release of slipstream in the policy's image and in the trainer's"
    check_schema(response.schema_version, "the trainer's", step)
    other_draft = "start the trainer with a draft made for this policy"
    layers = tuple(response.aux_layers)
    if layers:  # none: a draft that takes the final state alone
        check_layers(layers, "aux_layers", other_draft, last=len(policy.layers))
    ids = list(response.draft_vocab_ids)
    if not ids:
        raise RefusedError("draft_vocab_ids", "none", "at least one id", other_draft)
    ascending = all(a < b for a, b in pairwise(ids))
    if not ascending or ids[0] < 0 or ids[-1] >= policy.vocab_size:
        found = f"{ids[0]} to {ids[-1]}, ascending: {ascending}"
        expected = f"ascending ids below the policy's vocabulary of {policy.vocab_size}"
        raise RefusedError("draft_vocab_ids", found, expected, other_draft)
    if response.max_tokens_per_sample < 2:
        found = str(response.max_tokens_per_sample)
        raise RefusedError(
            "max_tokens_per_sample", found, "at least 2", "raise the trainer's limit"
        )
    known = joined and response.HasField("latest_policy_version")
    return Session(
        session_id=response.session_id,
        aux_layers=layers,
        draft_vocab_ids=torch.tensor(ids, device="cpu"),
        max_tokens=response.max_tokens_per_sample,
        latest_policy_version=response.latest_policy_version if known else None,
        rollout_servers=tuple(response.rollout_servers),
    )


BLOCK_BYTES = 1 << 20
"""The size of a block: about a tenth of a millisecond of one core's memory traffic."""

_PAUSE_SECONDS, _MOST_SECONDS = 0.004, 1.0


def _blocks(contents: Mapping[str, memoryview]) -> Iterator[tuple[str, int, memoryview]]:
    """Name, offset and content of every block, with a pause after each.

    A thread that copies under the interpreter's lock stops the policy's thread for as long: here it
    has a small share of the time. All pauses together are bounded, so that a version is known
    before the next ones come: samples of one that is not are shed.
    """
    count = -(-sum(map(len, contents.values())) // BLOCK_BYTES)
    pause = min(_PAUSE_SECONDS, _MOST_SECONDS / max(count, 1)) if count > 1 else 0.0
    for name, data in contents.items():
        for offset in range(0, len(data), BLOCK_BYTES):
            yield name, offset, data[offset : offset + BLOCK_BYTES]
            time.sleep(pause)


_METHOD = pb.DESCRIPTOR.services_by_name["DraftTrainer"].methods_by_name["AnnouncePolicy"]
_MAX_DROPPED = 256
_MAX_SNAPSHOTS = 2
_GATHERED_BYTES = 64 << 20


@dataclass(eq=False)
class PolicySnapshot:
    """The matrices of one policy version for the trainer's teacher, on CPU, in the policy's dtype.

    Attributes:
        policy_version: its number.
        tensors: ``lm_head.weight`` [draft_vocab, H], ``embed_tokens.weight`` [vocab, H] and, where
            the policy has one, ``lm_head.bias`` [draft_vocab]. Empty: another process of the policy
            announces them.
        specs: those of the tensors, with their hashes, once they were announced.
        asked: when a sample first waited for another process to announce it, monotonic seconds.
        announced: whether this process announced it.
    """

    policy_version: int
    tensors: dict[str, torch.Tensor]
    specs: list[tensor_pb2.TensorSpec] = field(default_factory=list)
    asked: float | None = None
    announced: bool = False


class Announcer:
    """Keeps the newest snapshots and announces each once per trainer that lacks it.

    ``stop`` ends what it is at.
    """

    def __init__(self, channel: grpc.Channel, stop: threading.Event) -> None:
        self._stop = stop
        # Not through the stub, which copies a chunk five times under the interpreter's lock.
        self._call: Callable[..., pb.AnnouncePolicyResponse] = channel.stream_unary(
            f"/{_METHOD.containing_service.full_name}/{_METHOD.name}",
            response_deserializer=pb.AnnouncePolicyResponse.FromString,
        )
        self._lock = threading.Lock()
        self._snapshots: OrderedDict[int, PolicySnapshot] = OrderedDict()
        self._session: Session | None = None
        self._known: int | None = None
        self._announcing: int | None = None
        self._held_hashes: set[bytes] = set()
        # Kept for tensors that do not change from one snapshot to the next.
        self._hashes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        # Of the run, in which this process has announced a version; None before that.
        self.history: int | None = None
        # Samples of these may still be on their way from the policy's device.
        self._dropped: deque[int] = deque(maxlen=_MAX_DROPPED)

    def offer(self, snapshot: PolicySnapshot) -> list[int]:
        """Take the newest snapshot; returns versions that were dropped without being announced."""
        with self._lock:
            self._snapshots[snapshot.policy_version] = snapshot
            dropped = []
            # The newest stays, and before it one that is being announced rather than one that
            # waits: to a slow trainer each would be given up before it is known.
            while len(self._snapshots) > _MAX_SNAPSHOTS:
                version = next(kept for kept in self._snapshots if kept != self._announcing)
                if not self._knows(version):
                    dropped.append(version)
                del self._snapshots[version]
            self._dropped.extend(dropped)
            return dropped

    def open_session(self, session: Session, forget: bool) -> None:
        """Start over with a (possibly new) trainer process; ``forget`` drops the snapshots."""
        with self._lock:
            if forget:
                self._snapshots.clear()
            self._session = session
            self._known = session.latest_policy_version
            self._held_hashes.clear()
            for snapshot in self._snapshots.values():
                # The lead may have waited for this trainer as well.
                snapshot.asked = None

    def due(self, up_to: int | None = None) -> int | None:
        """The oldest version to announce, at most ``up_to``; None if there is none.

        Of versions that another process announces only ``up_to`` itself is due, that of a sample
        that waits: no other is needed, and one that never comes would hide this one.
        """
        with self._lock:
            for version, snapshot in sorted(self._snapshots.items()):
                wanted = version == up_to
                if snapshot.tensors:
                    wanted = up_to is None or version <= up_to
                if wanted and not self._knows(version):
                    return version
            return None

    def knows(self, version: int) -> bool:
        """Return whether the trainer knows of ``version``, from this bridge or another one."""
        with self._lock:
            return self._knows(version) and version not in self._dropped

    def announce(self, version: int, timeout: float) -> None:
        """Tell the trainer of a version that is due: its matrices, where it lacks their content.

        Sends for ``timeout`` seconds at most. Raises grpc.RpcError: refused or failed.
        """
        with self._lock:
            session, snapshot = self._session, self._snapshots.get(version)
            if session is None or snapshot is None:
                raise RefusedError("policy_version", version, "a version that is due", "call due()")
            self._announcing = version
        try:
            specs = snapshot.specs = snapshot.specs or _specs_of(
                snapshot.tensors, self._hashes, self._stop
            )
            header = pb.AnnouncePolicyHeader(
                session_id=session.session_id, policy_version=version, tensors=specs
            )
            names = {spec.name for spec in specs if spec.sha256 not in self._held_hashes}
            bases = self._bases(snapshot, names)
            for name, (sha256, _) in bases.items():
                header.bases[name] = sha256
            try:
                answer = self._send(header, snapshot, names, bases, timeout)
            except grpc.RpcError as error:
                refusal = refused_from(error)
                busy = refusal is not None and refusal.reason in OVERLOADED
                if refusal is None or busy or (len(names) == len(specs) and not bases):
                    raise
                # The trainer may have let go of a tensor that it had: send all of them.
                header.ClearField("bases")
                answer = self._send(header, snapshot, set(snapshot.tensors), {}, timeout)
            with self._lock:
                if answer.HasField("history"):
                    self.history = answer.history
                self._held_hashes.update(spec.sha256 for spec in specs)
                self._known, snapshot.announced = version, True
        finally:
            with self._lock:
                self._announcing = None

    def _bases(
        self, snapshot: PolicySnapshot, names: set[str]
    ) -> dict[str, tuple[bytes, torch.Tensor]]:
        """Return tensors of an earlier version that the trainer has, with their SHA-256, by name.

        A step of RL at a learning rate of 1e-6 leaves over 95 % of bfloat16 values as they are, and
        in any type most embeddings of tokens that no sequence has.
        """
        with self._lock:
            kept = [one for one in self._snapshots.values() if one.announced]
        before = [one for one in kept if one.policy_version < snapshot.policy_version]
        found = {}
        for spec in before[-1].specs if before else ():
            # None are sent of a version that another process announces.
            if spec.name in names and spec.sha256 in self._held_hashes:
                old, new = before[-1].tensors[spec.name], snapshot.tensors[spec.name]
                if (old.shape, old.dtype) == (new.shape, new.dtype):
                    found[spec.name] = spec.sha256, old
        return found

    def _send(
        self,
        header: pb.AnnouncePolicyHeader,
        snapshot: PolicySnapshot,
        names: set[str],
        bases: Mapping[str, tuple[bytes, torch.Tensor]],
        timeout: float,
    ) -> pb.AnnouncePolicyResponse:
        sent = {name: bytes_of(snapshot.tensors[name]) for name in names}
        old = {name: bytes_of(tensor) for name, (_, tensor) in bases.items()}

        def requests() -> Iterator[bytes]:
            yield pb.AnnouncePolicyRequest(header=header).SerializeToString()
            for name, offset, block in _blocks(sent):
                if name in old:
                    before = old[name][offset : offset + len(block)]
                    block = memoryview(difference(block, before))
                yield frame_chunk(name, offset, block)

        return self._call(requests(), timeout=timeout)

    def awaits_lead(self, version: int, seconds: float) -> bool:
        """Return whether samples of a version that another process announces may still wait.

        They may for ``seconds`` from the first call after the run was opened. The other process's
        sync may take longer, and may end after this process has left its window.
        """
        with self._lock:
            snapshot = self._snapshots.get(version)
            if snapshot is None:
                return False
            if snapshot.asked is None:
                snapshot.asked = time.monotonic()
            return time.monotonic() - snapshot.asked < seconds

    def give_up(self, version: int) -> None:
        """Drop a version that the trainer will not take."""
        with self._lock:
            self._snapshots.pop(version, None)
            self._dropped.append(version)

    def _knows(self, version: int) -> bool:
        # A version that it had before may be of another job: it compares the contents.
        snapshot = self._snapshots.get(version)
        compared = snapshot is None or snapshot.announced or not snapshot.tensors
        return compared and self._known is not None and version <= self._known


def _specs_of(
    tensors: Mapping[str, torch.Tensor], known: WeakTensorKeyDictionary, stop: threading.Event
) -> list[tensor_pb2.TensorSpec]:
    """Make the spec of every tensor; ``known`` has the hashes of those hashed before.

    Raises RefusedError: ``stop`` was set before the end, which may be many seconds away.
    """
    new = {name: tensor for name, tensor in tensors.items() if tensor not in known}
    digests = {name: hashlib.sha256() for name in new}
    for name, _, block in _blocks({name: bytes_of(tensor) for name, tensor in new.items()}):
        if stop.is_set():
            raise RefusedError("bridge", "closed", "open", "build another PolicyBridge")
        digests[name].update(block)
    for name, tensor in new.items():
        known[tensor] = digests[name].digest()
    return [
        tensor_pb2.TensorSpec(
            name=name,
            dtype=dtype_to_wire(tensor.dtype),
            shape=list(tensor.shape),
            sha256=known[tensor],
        )
        for name, tensor in tensors.items()
    ]


@dataclass(frozen=True)
class _CopiedRows:
    """Rows of a parameter, [n, ...] on the CPU, copied when its version counter was ``written``."""

    parameter: weakref.ref[torch.Tensor]
    written: int
    rows: torch.Tensor

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Return whether ``parameter`` still has these rows."""
        return self.parameter() is parameter and self.written == parameter._version


class PolicyMatrices:
    """Takes snapshots of one policy. Their memory is reused once the announcer has dropped them.

    A parameter that is frozen (as with adapters) is copied once for as long as nothing is written
    to it; one that is trained every time, because some optimizers write past its version counter.
    """

    def __init__(self, modules: PolicyModules) -> None:
        self._modules = modules
        # Each memory, after a weak reference to the tensor that uses it, or did.
        self._slots: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._frozen: dict[str, _CopiedRows] = {}
        self._ids: torch.Tensor | None = None

    def snapshot(self, session: Session | None, policy_version: int) -> PolicySnapshot | None:
        """Copy lm_head's rows (and bias) of the draft vocabulary and the embeddings to the CPU.

        For a policy that is spread over ranks this is a collective call, whether or not a rank
        reaches the trainer: these matrices alone are gathered, if any rank has a session. A rank
        whose ``session`` is None gets None.

        Raises:
            RefusedError: the policy was sharded after the bridge was built.
            MemoryError: a rank has no device memory to gather them.
        """
        modules = self._modules
        head, bias, embed = modules.head_weight, modules.head_bias, modules.embed_weight
        if modules.shards:
            if not self._wanted_by_any(session is not None):
                return None
            try:
                whole = full_tensor(head)
                head, embed = whole, whole if embed is head else full_tensor(embed)
                bias = None if bias is None else full_tensor(bias)
            except RuntimeError as error:
                raise_unless_shortage(error)
                # Raise: if this rank skipped the collective, the others would hang in it.
                raise MemoryError(
                    "no device memory to gather lm_head and the embeddings, which every rank does "
                    "in bridge.sync. Next step: free memory before it, or set bytes_per_step = 0 "
                    "on every rank"
                ) from error
        else:
            modules.check_unsharded()
        if session is None:
            return None
        ids = session.draft_vocab_ids
        if self._ids is None or not torch.equal(ids, self._ids):
            self._ids = ids
            self._frozen.clear()
            self._slots.clear()
        tensors = {
            "lm_head.weight": self._copy_rows("lm_head.weight", head, ids),
            "embed_tokens.weight": self._copy_rows("embed_tokens.weight", embed, None),
        }
        if bias is not None:
            tensors["lm_head.bias"] = self._copy_rows("lm_head.bias", bias, ids)
        return PolicySnapshot(policy_version, tensors)

    def _wanted_by_any(self, wanted: bool) -> bool:
        sharded = next(shard for shard in self._modules.shards if is_sharded(shard))
        mesh = sharded.device_mesh  # type: ignore[attr-defined]
        flag = torch.tensor([int(wanted)], device=mesh.device_type)
        for dimension in range(mesh.ndim):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        return bool(flag.item())

    def _copy_rows(
        self, name: str, parameter: torch.Tensor, ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows ``ids`` of a parameter (None: all of them) in host memory."""
        frozen = isinstance(parameter, torch.nn.Parameter) and not parameter.requires_grad
        before = self._frozen.get(name) if frozen else None
        if before is not None and before.is_of(parameter):
            return before.rows
        value = parameter.detach()
        count = len(value) if ids is None else len(ids)
        pinned = value.device.type == "cuda"
        rows = self._reuse_memory(torch.Size((count, *value.shape[1:])), value.dtype, pinned)
        if ids is None:
            rows.copy_(value)
        elif not pinned:
            torch.index_select(value, 0, ids, out=rows)
        else:
            # In parts: the device may have no memory for a second copy of all of them.
            most = max(1, _GATHERED_BYTES // max(1, value[0].nbytes))
            for into, part in zip(rows.split(most), ids.split(most), strict=True):
                into.copy_(value.index_select(0, part.to(value.device)))
        if frozen:
            self._frozen[name] = _CopiedRows(weakref.ref(parameter), parameter._version, rows)
        return rows

    def _reuse_memory(self, shape: torch.Size, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        """Host memory of this kind: that of a tensor that is gone, or else new."""
        wanted = (shape, dtype, pinned)
        for number, (alias, memory) in enumerate(self._slots):
            if alias() is None and (memory.shape, memory.dtype, memory.is_pinned()) == wanted:
                del self._slots[number]
                break
        else:
            # A later sync, outside inference mode, must be able to write to it.
            with torch.inference_mode(False):
                memory = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
        rows = memory.view_as(memory)
        self._slots.append((weakref.ref(rows), memory))
        return rows
