"""Runs and the sessions that feed them. One run at a time: a trainer has one draft.

A run owns everything that is keyed by its policy versions: the matrices of each
version and the samples. A new run starts with neither, because version 7 of one
run says nothing about version 7 of another. A trainer that was killed, or stopped,
has its run again from the start on.

Takes a policy version's matrices off the wire, or finds those it holds by their hash.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import torch

from draft_trainer.drafters import DraftShape
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.ingest.store import Drawn, SampleStore
from draft_trainer.sample import STATE_DTYPES, Sample
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import ChunkAssembler, digest, dtype_from_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

MAX_SESSIONS = 256
MAX_RUN_ID_CHARACTERS = 256


@dataclass(frozen=True)
class PolicySizes:
    """The numbers of a ``PolicySpec`` that must not change within a run."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int

    @classmethod
    def of(cls, spec: pb.PolicySpec) -> PolicySizes:
        """From the message."""
        return cls(spec.hidden_size, spec.vocab_size, spec.num_hidden_layers)


class Run:
    """One run: its policy's sizes, its known policy versions, its samples.

    Args:
        run_id: the client's.
        sizes: of its policy.
        store: keeps its samples and policy versions, and may hold some of them already.
        max_policy_lag: samples of versions older than the newest by more are refused.
    """

    def __init__(
        self, run_id: str, sizes: PolicySizes, store: SampleStore, max_policy_lag: int
    ) -> None:
        self.run_id = run_id
        self.sizes = sizes
        self.store = store
        self.heads = PolicyHeads(max_policy_lag + 1)
        self._max_policy_lag = max_policy_lag
        self._announcing = threading.Lock()
        for head, digests in store.policies():
            self.heads.add(head, digests)
        self._forget_old()

    @property
    def latest_policy_version(self) -> int | None:
        """The newest version announced; None before the first."""
        versions = self.heads.versions
        return versions[-1] if versions else None

    def add_policy(self, head: PolicyHead) -> None:
        """Make a version known for good, and drop the samples of those that became too old.

        Raises:
            RefusedError: not higher than every version before (FAILED_PRECONDITION), or no room
                to keep it (RESOURCE_EXHAUSTED).
        """
        with self._announcing:
            digests = (digest(head.lm_head_rows), digest(head.embed_tokens))
            self.heads.check_newer(head.policy_version)
            # Kept first: a sample of it that is acknowledged can be trained on after a kill.
            self.heads.add(self.store.keep_policy(self.run_id, head, digests), digests)
            self._forget_old()

    def draw(self, max_tokens: int) -> Drawn:
        """See ``SampleStore.draw``."""
        return self.store.draw(self.run_id, max_tokens)

    def put_back(self, drawn: Drawn) -> None:
        """Undo a draw, but for the samples whose policy version was forgotten since."""
        self.store.put_back(drawn)
        with self._announcing:
            self._forget_old()

    def held_out(self, newest_versions: int | None = None) -> list[Sample]:
        """See ``SampleStore.held_out``."""
        return self.store.held_out(self.run_id, newest_versions)

    def _forget_old(self) -> None:
        known = self.heads.versions
        if known:
            oldest = known[-1] - self._max_policy_lag
            kept = [version for version in known if version >= oldest]
            self.store.keep_versions(self.run_id, kept)

    def check_policy_version(self, version: int) -> None:
        """Raise RefusedError for a sample of an unknown or too old version."""
        known = self.heads.versions
        if not known:
            raise RefusedError(
                "policy_version",
                version,
                "a version that was announced; none was yet",
                "call AnnouncePolicy before the first sample of a version",
            )
        if version < known[-1] - self._max_policy_lag:
            raise RefusedError(
                "policy_version",
                f"{version}, {known[-1] - version} behind",
                f"at most {self._max_policy_lag} behind {known[-1]} (replay.max_policy_lag)",
                "drop samples this old, or raise replay.max_policy_lag",
            )
        if version not in known:
            raise RefusedError(
                "policy_version",
                version,
                f"one of the announced versions {list(known)}",
                "call AnnouncePolicy before the first sample of a version",
            )


@dataclass(frozen=True)
class Session:
    """One client of a run."""

    session_id: str
    run: Run
    client: str


class Runs:
    """The current run and its sessions. Thread-safe.

    Args:
        draft: the draft head's configuration; a policy must fit it.
        store: keeps the run's samples; a run that it knows is current from the start.
        max_policy_lag: see ``Run``.
        max_sessions: beyond, the one that was used longest ago is forgotten; never one whose stream
            is open.

    Raises:
        RefusedError: what the store holds of a run cannot be read.
    """

    def __init__(
        self,
        draft: DraftShape,
        store: SampleStore,
        max_policy_lag: int,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self._draft = draft
        self._store = store
        self._max_policy_lag = max_policy_lag
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._max_sessions = max_sessions
        self._streaming: Counter[str] = Counter()
        found = store.run
        self._run: Run | None = None
        if found is not None:
            run_id, sizes = found
            self._run = Run(run_id, PolicySizes(**sizes), store, max_policy_lag)

    @property
    def current(self) -> Run | None:
        """The run that is being fed; None before the first."""
        with self._lock:
            return self._run

    @property
    def streams(self) -> int:
        """Open streams of samples."""
        with self._lock:
            return self._streaming.total()

    @property
    def sessions(self) -> int:
        """Open sessions."""
        with self._lock:
            return len(self._sessions)

    def open(self, request: pb.OpenRunRequest) -> Session:
        """Continue the current run or begin another one.

        Raises:
            RefusedError: the policy does not fit the draft (INVALID_ARGUMENT), differs from
                this run's (INVALID_ARGUMENT), or another run is being fed
                (FAILED_PRECONDITION).
        """
        if not 0 < len(request.run_id) <= MAX_RUN_ID_CHARACTERS:
            raise RefusedError(
                "run_id",
                f"{len(request.run_id)} characters",
                f"1 to {MAX_RUN_ID_CHARACTERS} characters",
                "choose an id for the run",
            )
        sizes = PolicySizes.of(request.policy)
        check_fit(sizes, self._draft)
        with self._lock:
            run = self._run
            if run is None or run.run_id != request.run_id:
                run = self._begin(request.run_id, sizes)
            elif run.sizes != sizes:
                raise RefusedError(
                    "policy",
                    sizes,
                    f"{run.sizes}, as run {run.run_id!r} was opened",
                    "open another run id for another policy",
                )
            session = Session(uuid.uuid4().hex, run, request.client)
            self._sessions[session.session_id] = session
            # Not the oldest first: a flood of new ones would end those that feed the run.
            idle = (each for each in self._sessions if not self._streaming[each])
            for each in list(islice(idle, max(len(self._sessions) - self._max_sessions, 0))):
                del self._sessions[each]
            return session

    def session(self, session_id: str) -> Session:
        """The session of an id. Raises RefusedError (FAILED_PRECONDITION) if it is not open."""
        with self._lock:
            if session_id not in self._sessions:
                raise RefusedError(
                    "session_id",
                    repr(session_id),
                    "the id that OpenRun answered, of the current run",
                    "call OpenRun again: the trainer restarted or another run began",
                    StatusCode.FAILED_PRECONDITION,
                )
            self._sessions.move_to_end(session_id)
            return self._sessions[session_id]

    def enter_stream(self, session_id: str, limit: int) -> Session:
        """As ``session``, for a stream of samples; the caller calls ``leave_stream`` after it.

        Raises:
            RefusedError: unknown session, or ``limit`` streams are open (RESOURCE_EXHAUSTED).
        """
        session = self.session(session_id)
        with self._lock:
            streams = self._streaming.total()
            if streams >= limit:
                raise RefusedError(
                    "StreamStates",
                    f"{streams} open streams",
                    f"at most {limit} (server.max_streams)",
                    "send from fewer processes, or raise server.max_streams",
                    StatusCode.RESOURCE_EXHAUSTED,
                )
            self._streaming[session_id] += 1
        return session

    def leave_stream(self, session_id: str) -> None:
        """A session's stream ended."""
        with self._lock:
            self._streaming[session_id] -= 1
            self._streaming = +self._streaming

    def _begin(self, run_id: str, sizes: PolicySizes) -> Run:
        streams = self._streaming.total()
        if self._run is not None and streams:
            raise RefusedError(
                "run_id",
                run_id,
                f"{self._run.run_id!r}, which {streams} stream(s) feed now",
                "end that run first, or start another draft-trainer for this one",
                StatusCode.FAILED_PRECONDITION,
            )
        self._sessions.clear()
        self._store.begin(run_id, asdict(sizes))
        self._run = Run(run_id, sizes, self._store, self._max_policy_lag)
        return self._run


def check_fit(policy: PolicySizes, draft: DraftShape) -> None:
    """Raise RefusedError unless a policy of these sizes can be captured for this draft."""
    advice = "start the trainer with a draft made for this policy"
    if policy.hidden_size != draft.target_hidden_size:
        raise RefusedError(
            "policy.hidden_size",
            policy.hidden_size,
            f"{draft.target_hidden_size} (the draft's target_hidden_size)",
            advice,
        )
    if policy.vocab_size != draft.vocab_size:
        raise RefusedError(
            "policy.vocab_size", policy.vocab_size, f"{draft.vocab_size} (the draft's)", advice
        )
    if policy.num_hidden_layers <= max(draft.aux_layer_ids):
        raise RefusedError(
            "policy.num_hidden_layers",
            policy.num_hidden_layers,
            f"more than {max(draft.aux_layer_ids)}, the draft's last auxiliary layer",
            advice,
        )


LM_HEAD = "lm_head.weight"
EMBED_TOKENS = "embed_tokens.weight"

# SQLite's integers.
_MOST_VERSION = (1 << 63) - 1


def announce(
    run: Run,
    draft: DraftShape,
    header: pb.AnnouncePolicyHeader,
    chunks: Iterable[tensor_pb2.TensorChunk],
) -> None:
    """Make a policy version known to ``run``; nothing of it is known if anything is wrong.

    A known version may be announced again with the same content, which changes nothing:
    a retry after a lost answer, or another rank of the same policy, maybe a version late.

    Raises:
        RefusedError: wrong names, shapes, dtypes or hashes, values that are not finite, a
            tensor that is neither sent nor held, or a version that is not new.
    """
    if header.policy_version > _MOST_VERSION:
        raise RefusedError(
            "policy_version", header.policy_version, f"at most {_MOST_VERSION}", "count up from 0"
        )
    specs = _checked(header.tensors, draft)
    latest, version = run.latest_policy_version, header.policy_version
    if _is_known(run, version, specs):
        return
    if latest is not None and version <= latest:
        # Before the tensors are received, which may be a gigabyte.
        raise RefusedError(
            "policy_version",
            version,
            f"higher than {latest}",
            "number policy versions in ascending order; a new run starts again at 0",
            StatusCode.FAILED_PRECONDITION,
        )
    tensors = _receive(run, specs, chunks)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise RefusedError(
                name,
                "values that are not finite",
                "finite values",
                "do not sync this policy version: its training step diverged",
            )
    try:
        run.add_policy(PolicyHead(version, tensors[LM_HEAD], tensors[EMBED_TOKENS]))
    except RefusedError:
        # Two ranks announced it at once, and this one came second.
        if not _is_known(run, version, specs):
            raise


def _checked(
    specs: Sequence[tensor_pb2.TensorSpec], draft: DraftShape
) -> dict[str, tensor_pb2.TensorSpec]:
    shapes = {
        LM_HEAD: [draft.draft_vocab_size, draft.target_hidden_size],
        EMBED_TOKENS: [draft.vocab_size, draft.target_hidden_size],
    }
    # Not all of them: a header of a few megabytes has millions.
    names = [spec.name for spec in specs[:8]]
    if sorted(names) != sorted(shapes):
        raise RefusedError(
            "tensors",
            names,
            sorted(shapes),
            "announce both matrices, each of them once",
        )
    for spec in specs:
        if list(spec.shape) != shapes[spec.name]:
            raise RefusedError(
                f"{spec.name}.shape",
                list(spec.shape),
                shapes[spec.name],
                "send the lm_head rows of OpenRunResponse.draft_vocab_ids and all embeddings",
            )
        dtype = dtype_from_wire(spec.dtype, spec.name)
        if dtype not in STATE_DTYPES:
            raise RefusedError(
                f"{spec.name}.dtype",
                dtype,
                f"one of {', '.join(map(str, STATE_DTYPES))}",
                "send the policy's weights",
            )
    return {spec.name: spec for spec in specs}


def _receive(
    run: Run,
    specs: dict[str, tensor_pb2.TensorSpec],
    chunks: Iterable[tensor_pb2.TensorChunk],
) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, spec in specs.items():
        held = run.heads.tensor(spec.sha256)
        if held is not None and _fits(held, spec):
            tensors[name] = held
    missing = {name: spec for name, spec in specs.items() if name not in tensors}
    # The shapes were checked against the draft: their size is the bound.
    assembler = ChunkAssembler(missing.values(), max_bytes=1 << 62)
    sent = set()
    for chunk in chunks:
        if chunk.name not in tensors:
            assembler.feed(chunk)
            sent.add(chunk.name)
    absent = sorted(missing.keys() - sent)
    if absent:
        raise RefusedError(
            "tensors",
            f"no chunks of {', '.join(absent)}",
            "chunks of every tensor that the trainer does not hold under its SHA-256",
            "send it: the trainer restarted, or the versions that held it were forgotten",
            StatusCode.FAILED_PRECONDITION,
        )
    return tensors | assembler.finish()


def _is_known(run: Run, version: int, specs: dict[str, tensor_pb2.TensorSpec]) -> bool:
    if version not in run.heads.versions:
        return False
    return run.heads.digests(version) == (specs[LM_HEAD].sha256, specs[EMBED_TOKENS].sha256)


def _fits(tensor: torch.Tensor, spec: tensor_pb2.TensorSpec) -> bool:
    same_dtype = tensor.dtype == dtype_from_wire(spec.dtype, spec.name)
    return same_dtype and list(tensor.shape) == list(spec.shape)
