"""Runs and the sessions that feed them. One run at a time: a trainer has one draft.

A run owns everything that is keyed by its policy versions: the matrices of each version and the
samples. A new run starts with neither, because version 7 of one run says nothing about version 7
of another. A trainer that was killed or stopped continues its run.

A job that resumes from an older checkpoint with its run id begins a new history of the run, which
is a new ``Run``: what the job before announced from that version on is dropped, because its
versions are of other weights. Histories are counted, and a process that has announced a version
names its history when it opens the run again. So a process of an earlier one, which may still run,
is refused whether the trainer or the connection was lost meanwhile, and never turns the run back.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from draft_trainer.drafters import DraftShape
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.ingest.policies import (
    POLICIES,
    MatrixFiles,
    check_fit,
    checked_specs,
    policy_fields,
    policy_of,
    receive_matrices,
)
from draft_trainer.ingest.store import Drawn, SampleStore
from slipstream.errors import RefusedError, StatusCode
from slipstream.sample import Sample
from slipstream.sampling import LogitForm
from slipstream.tensors import digest
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2, tensor_pb2

logger = logging.getLogger(__name__)

MAX_SESSIONS = 256
MAX_RUN_ID_CHARACTERS = 256

# Behind a run id, which is one printable line, and before the number of a later history.
_HISTORY = "\n"

# The largest of SQLite's integers.
_MOST_VERSION = (1 << 63) - 1


class Run:
    """One history of a run: its policy, its known policy versions, its samples.

    Args:
        key: from ``key_of_history``.
        policy: from ``policy_of``.
        store: holds its samples and policy versions, maybe from before a restart.
        max_policy_lag: samples older than the newest version by more are refused.

    Attributes:
        run_id: the client's.
        history: the number of earlier histories of this run.
        superseded: whether a later history has begun.
        began: monotonic time at which this process began or continued it.
        first_policy_version: the version that a draft of no or another run counts as trained on;
            None before the first. A run that continues another one's checkpoint need not count
            from 0.
    """

    def __init__(
        self, key: str, policy: pb.PolicySpec, store: SampleStore, max_policy_lag: int
    ) -> None:
        self.key = key
        self.run_id, _, history = key.partition(_HISTORY)
        self.history = int(history or 0)
        self.superseded = False
        self.policy = policy
        self.store = store
        self.began = time.monotonic()
        self.heads = PolicyHeads(max_policy_lag + 1)
        self._max_policy_lag = max_policy_lag
        self._versions_lock = threading.Lock()
        self._matrices = MatrixFiles(store.folder / POLICIES)
        self.first_policy_version = store.first_policy()
        if known := store.policies():
            # Dropped as stale, not as damaged: versions beyond a lag that was lowered since, and
            # samples of forgotten versions that were kept because they were drawn and not yet in a
            # saved state, when a kill undid the draws.
            oldest = known[-1][0] - max_policy_lag
            known = [(version, names) for version, names in known if version >= oldest]
            store.keep_versions(key, [version for version, _ in known])
        for version, names in known:
            try:
                tensors = [self._matrices.read(name) for name in names]
            except RefusedError as error:
                logger.error("policy version %d is dropped with its samples: %s", version, error)
                continue
            head = PolicyHead(version, *tensors, form=LogitForm.of(policy))
            self.heads.add(head, tuple(map(bytes.fromhex, names)))
        store.keep_versions(key, self.heads.versions, reason="damaged")
        self._forget_old()

    @property
    def latest_policy_version(self) -> int | None:
        """The newest version that is known; None before the first."""
        versions = self.heads.versions
        return versions[-1] if versions else None

    def register_policy(
        self,
        draft: DraftShape,
        header: pb.AnnouncePolicyHeader,
        chunks: Iterable[tensor_pb2.TensorChunk],
    ) -> None:
        """Register a policy version, or nothing of it if anything is wrong.

        A known version may be registered again with the same content, which changes nothing: a
        retry after a lost answer, or another rank of the same policy, maybe a version late.

        Args:
            draft: the matrices must fit it.
            header: the version, and the specs of its tensors.
            chunks: chunks of tensors that may not be held, see ``receive_matrices``.

        Raises:
            RefusedError: wrong tensors, or a version that is not new (FAILED_PRECONDITION).
        """
        version = header.policy_version
        if version > _MOST_VERSION:
            raise RefusedError(
                "policy_version", version, f"at most {_MOST_VERSION}", "count up from 0"
            )
        if not header.tensors:
            # From a process that does not lead: the leader announces.
            if version in self.heads.versions:
                return
            self.heads.check_newer(version)
            raise _not_announced(version)
        specs = checked_specs(header.tensors, draft, self.policy.lm_head_bias)
        digests = tuple(spec.sha256 for spec in specs.values())
        if self.knows(version, digests):
            return
        # Before the tensors are received, which may be a gigabyte.
        self.heads.check_newer(version)
        tensors = receive_matrices(specs, header.bases, chunks, self.heads.tensor)
        try:
            self.add_policy(PolicyHead(version, *(tensors[name] for name in specs)))
        except RefusedError:
            # Two ranks registered it at once, and this one came second.
            if not self.knows(version, digests):
                raise

    def add_policy(self, head: PolicyHead) -> None:
        """Register a version durably, and drop the samples of versions that became too old.

        Raises:
            RefusedError: not higher than every version before, or the run is not the current one
                (FAILED_PRECONDITION), or no space for it (RESOURCE_EXHAUSTED).
        """
        with self._versions_lock:
            digests = tuple(map(digest, head.tensors))
            self.heads.check_newer(head.policy_version)
            # Written first, so that an acknowledged sample of it can be trained on after a kill.
            kept = [self._matrices.keep(*pair) for pair in zip(head.tensors, digests, strict=True)]
            names = [each.hex() for each in digests]
            self.store.put_policy(self.key, head.policy_version, names)
            self.first_policy_version = self.store.first_policy()
            form = LogitForm.of(self.policy)
            self.heads.add(PolicyHead(head.policy_version, *kept, form=form), digests)
            self._forget_old()

    def draw(self, max_tokens: int, ahead: bool = False) -> Drawn:
        """See ``SampleStore.draw``."""
        return self.store.draw(self.key, max_tokens, ahead)

    def put_back(self, drawn: Drawn) -> None:
        """Undo a draw, except for samples whose policy version was forgotten since."""
        self.store.put_back(drawn)
        with self._versions_lock:
            self._forget_old()

    def held_out(self, newest_versions: int | None = None) -> list[Sample]:
        """See ``SampleStore.held_out``."""
        return self.store.held_out(self.key, newest_versions)

    @property
    def held_out_by_completion(self) -> bool:
        """See ``SampleStore``."""
        return self.store.held_out_by_completion

    def knows(self, version: int, digests: Sequence[bytes]) -> bool:
        """Return whether a version is held, with matrices of these SHA-256."""
        return version in self.heads.versions and self.heads.digests(version) == tuple(digests)

    def _forget_old(self) -> None:
        known = self.heads.versions
        oldest = (known[-1] if known else 0) - self._max_policy_lag
        kept = [version for version in known if version >= oldest]
        if self.store.keep_versions(self.key, kept):
            self._matrices.keep_only({name for _, names in self.store.policies() for name in names})

    def check_current(self) -> None:
        """Raise RefusedError (FAILED_PRECONDITION) if a later history of the run has begun."""
        if self.superseded:
            raise _superseded(self.run_id, self.history, self.history + 1)

    def check_policy_version(self, version: int) -> None:
        """Raise RefusedError for a sample of an unknown or too old version."""
        known = self.heads.versions
        lag = known[-1] - version if known else 0
        if lag > self._max_policy_lag:
            expected = f"at most {self._max_policy_lag} behind {known[-1]} (replay.max_policy_lag)"
            advice = "drop samples this old, or raise replay.max_policy_lag"
            raise RefusedError("policy_version", f"{version}, {lag} behind", expected, advice)
        if version not in known:
            expected = f"one of the announced versions {list(known)}"
            advice = "call AnnouncePolicy before the first sample of a version"
            raise RefusedError("policy_version", version, expected, advice)


def key_of_history(run_id: str, history: int) -> str:
    """Return what the store knows a history of a run by: of the first one, the run id itself."""
    return f"{run_id}{_HISTORY}{history}" if history else run_id


def _not_announced(version: int) -> RefusedError:
    return RefusedError(
        "lead",
        f"policy version {version}, which no process has announced",
        "one that the leading process has announced",
        "ask again later",
        StatusCode.FAILED_PRECONDITION,
        release_pb2.REFUSAL_REASON_NOT_ANNOUNCED,
    )


def _superseded(run_id: str, history: int, newest: int) -> RefusedError:
    found = f"{history} of run {run_id!r}"
    expected = f"{newest}, which another process has begun from an older checkpoint"
    advice = "end this process, or give it a run_id of its own"
    return RefusedError("history", found, expected, advice, StatusCode.FAILED_PRECONDITION)


@dataclass(eq=False)
class Session:
    """One client of a run.

    Attributes:
        session_id: answered to OpenRun.
        run: the history that it feeds.
        client: a name for logs.
        found: the newest policy version when it was opened, of a process that had announced none
            before; None if there was none, or if a new history has begun since.
        joined: whether its process has announced a version of this history.
    """

    session_id: str
    run: Run
    client: str
    found: int | None = None
    joined: bool = False


class Runs:
    """The current run and its sessions. Thread-safe; only ``open`` waits for the store.

    Args:
        draft: the draft head's configuration; a policy must fit it.
        store: keeps the run's samples; a run that it knows is current from the start.
        max_policy_lag: see ``Run``.
        max_sessions: beyond it, the least recently used session without an open stream is
            forgotten.

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
        # Held while a run begins, which may take long.
        self._begin_lock = threading.Lock()
        # Guards sessions and streams. Never held for long: the server's event loop waits for it.
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._max_sessions = max_sessions
        self._open_streams: Counter[str] = Counter()
        found = store.run
        self._run: Run | None = None
        if found is not None:
            key, facts = found
            self._run = Run(key, pb.PolicySpec(**facts), store, max_policy_lag)

    @property
    def current(self) -> Run | None:
        """The run that is being fed; None before the first."""
        return self._run

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        with self._lock:
            return len(self._sessions)

    def open(self, request: pb.OpenRunRequest) -> Session:
        """Continue the current run or begin another one.

        Raises:
            RefusedError: the policy does not fit the draft (INVALID_ARGUMENT), differs from
                this run's (INVALID_ARGUMENT), another run is being fed, or a later history of
                this one has begun (FAILED_PRECONDITION).
        """
        if not 0 < (length := len(request.run_id)) <= MAX_RUN_ID_CHARACTERS:
            raise RefusedError(
                "run_id", f"{length} characters", f"1 to {MAX_RUN_ID_CHARACTERS}", "choose an id"
            )
        if request.history > _MOST_VERSION:
            advice = "send what AnnouncePolicy answered"
            raise RefusedError("history", request.history, f"at most {_MOST_VERSION}", advice)
        policy = policy_of(request.policy)
        check_fit(policy, self._draft)
        with self._begin_lock:
            run, joined = self._run, request.HasField("history")
            if run is None or run.run_id != request.run_id:
                run = self._begin(key_of_history(request.run_id, request.history), policy)
            elif run.policy != policy:
                expected = f"{policy_fields(run.policy)}, run {run.run_id!r}'s"
                next_step = "open another run id"
                raise RefusedError("policy", policy_fields(policy), expected, next_step)
            elif joined and request.history < run.history:
                raise _superseded(run.run_id, request.history, run.history)
            elif request.history > run.history:
                # The trainer has lost its samples, and a process of an earlier history came first.
                run = self._begin_again(request.history, 0)
            found = None if joined else run.latest_policy_version
            session = Session(uuid.uuid4().hex, run, request.client, found, joined)
            with self._lock:
                self._sessions[session.session_id] = session
                # Only idle ones: a flood of new sessions must not end those that feed the run.
                idle = (each for each in self._sessions if not self._open_streams[each])
                for each in list(islice(idle, max(len(self._sessions) - self._max_sessions, 0))):
                    del self._sessions[each]
            return session

    def announce(
        self,
        session: Session,
        header: pb.AnnouncePolicyHeader,
        chunks: Iterable[tensor_pb2.TensorChunk],
    ) -> bool:
        """Register a policy version, see ``Run.register_policy``; return whether a history began.

        The first version of a process that is below the newest one, or is that one with other
        matrices, is of a job that resumed from an older checkpoint.

        Raises:
            RefusedError: as ``Run.register_policy``; a later history has begun.
        """
        run, version, found = session.run, header.policy_version, session.found
        run.check_current()
        began = False
        if not session.joined and found is not None and version <= found:
            if not header.tensors:
                # Its leader may be about to begin a new history.
                if version < found:
                    raise _not_announced(version)
            else:
                specs = checked_specs(header.tensors, self._draft, run.policy.lm_head_bias)
                same = run.knows(version, [spec.sha256 for spec in specs.values()])
                if version < found or not same:
                    with self._begin_lock:
                        # Unless a process of the same job did while this one waited.
                        if began := session.run is run:
                            self._begin_again(run.history + 1, version)
        session.run.register_policy(self._draft, header, chunks)
        session.joined |= bool(header.tensors) or session.found is None or version > session.found
        return began

    def session(self, session_id: str) -> Session:
        """Return an open session. Raises RefusedError (FAILED_PRECONDITION) if it is not open."""
        with self._lock:
            return self._look_up(session_id)

    @contextmanager
    def stream(self, session_id: str, limit: int) -> Iterator[Session]:
        """Return an open session and count it as streaming within a ``with`` block.

        Raises:
            RefusedError: unknown session, or ``limit`` streams are open (RESOURCE_EXHAUSTED).
        """
        # Looked up and counted under one lock: in between, another run could begin.
        with self._lock:
            session = self._look_up(session_id)
            streams = self._open_streams.total()
            if streams >= limit:
                found, expected = f"{streams} open streams", f"at most {limit} (server.max_streams)"
                advice = "send from fewer processes, or raise server.max_streams"
                code = StatusCode.RESOURCE_EXHAUSTED
                raise RefusedError("StreamStates", found, expected, advice, code)
            self._open_streams[session_id] += 1
        try:
            yield session
        finally:
            with self._lock:
                self._open_streams[session_id] -= 1
                self._open_streams = +self._open_streams

    def _look_up(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            expected = "the id that OpenRun answered, of the current run"
            advice = "call OpenRun again: the trainer restarted or another run began"
            code, reason = StatusCode.FAILED_PRECONDITION, release_pb2.REFUSAL_REASON_SESSION
            raise RefusedError("session_id", repr(session_id), expected, advice, code, reason)
        self._sessions.move_to_end(session_id)
        return self._sessions[session_id]

    def _begin_again(self, history: int, version: int) -> Run:
        """Begin another history of the current run at a policy version; the lock is held.

        Sessions whose process has announced a version are forgotten, the others go on in it: they
        are of the job that begins it.
        """
        before = self._run
        assert before is not None
        key, facts = key_of_history(before.run_id, history), policy_fields(before.policy)
        dropped = self._store.begin(key, facts, version)
        # The store has dropped them, even if the new history cannot be made.
        before.superseded, self._run = True, None
        self._run = Run(key, before.policy, self._store, self._max_policy_lag)
        with self._lock:
            for session in list(self._sessions.values()):
                if session.joined:
                    del self._sessions[session.session_id]
                else:
                    session.run, session.found = self._run, None
        logger.warning(
            "run %r resumes at policy version %d from an older checkpoint: the versions from there "
            "to %s are dropped with %d samples, and the process that sent them is refused",
            *(before.run_id, version, before.latest_policy_version, dropped),
        )
        return self._run

    def _begin(self, key: str, policy: pb.PolicySpec) -> Run:
        with self._lock:
            streams = self._open_streams.total()
            if self._run is not None and streams:
                expected = f"{self._run.run_id!r}, which {streams} stream(s) feed now"
                advice = (
                    "close the PolicyBridge of that run or, if it is lost, end its process (in a "
                    "notebook: restart the kernel); or start another draft-trainer for this run"
                )
                code = StatusCode.FAILED_PRECONDITION
                raise RefusedError("run_id", key.partition(_HISTORY)[0], expected, advice, code)
            # From here on the previous run's streams cannot be opened.
            self._sessions.clear()
        self._store.begin(key, policy_fields(policy))
        # The store has dropped the previous run, even if the new one cannot be made.
        self._run = None
        self._run = Run(key, policy, self._store, self._max_policy_lag)
        return self._run
