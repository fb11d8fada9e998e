"""The policy's weight sync: the draft is staged before it and committed with it.

The policy does not depend on the trainer: when the trainer is absent or late, the bridge commits
the policy itself. It does depend on the rollout servers: a server that does not take the policy is
an error to the caller, because training on rollouts of a stale policy would go unnoticed. Four
exceptions: a push is left to the next window where the trainer, which alone knows the servers, was
not reached yet; with ``skip_unreachable_servers`` a server that cannot be reached is left out and
counted; and so are, always, one that joins and is not ready for this version yet, and one that the
trainer no longer lists and that does not take it.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import InitVar, dataclass, field, replace

import grpc
import torch
from torch import nn

from policy_bridge.config import BridgeConfig
from policy_bridge.fleet import SILENT, Errors, RolloutFleet, Tensors, describe
from policy_bridge.logits import is_sharded
from policy_bridge.lora import Merge, without_adapters
from policy_bridge.model import as_stored, full_tensor, kept_wide, plain_name, unwrapped
from policy_bridge.session import Session
from policy_bridge.stats import SyncResult
from slipstream.errors import RefusedError, refused_from
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import rollout_server_pb2 as rollout_pb

ANSWER_SECONDS = 2.0
"""Longest wait for the trainer's answer to CompleteSync after the bridge's own commits: the
trainer's have then ended, too."""

_JOINED = "it joined after the policy was staged; the next sync brings it one"


class PolicySyncError(RuntimeError):
    """An error of at least one rollout server that did not take the policy. Can be pickled.

    Attributes:
        errors: by server address.
        result: what was reached before it.
    """

    def __init__(self, stage: str, errors: Mapping[str, str], result: SyncResult) -> None:
        self._stage = stage
        self.errors = {**errors}
        self.result = result
        texts = "; ".join(f"{address}: {text}" for address, text in self.errors.items())
        super().__init__(
            f"policy version {result.policy_version} was not {stage} on {len(errors)} rollout "
            f"server(s): {texts}. Next step: see to those servers, then sync again"
        )

    def __reduce__(self) -> tuple[type[PolicySyncError], tuple[object, ...]]:
        return type(self), (self._stage, self.errors, self.result)


@dataclass(eq=False)
class SyncWindow:
    """A window around a weight sync: ``with bridge.sync(version) as window: ...``.

    Attributes:
        model: whose weights ``push_policy`` pushes by default.
        session: the open run; None while the trainer cannot be reached.
        servers: host:port of every rollout server, after entry those that the trainer has now.
        fleet_known: whether there are no others: the trainer has named its own, or never will.
        lead: whether this process stages the draft and pushes the policy.
        told: the servers that the trainer named in the last window, by session id.
        result: what was done; set at the end of the window.
        trainer_silent: whether the trainer let a deadline pass.
    """

    version: InitVar[int]
    model: nn.Module
    config: BridgeConfig
    trainer: pb_grpc.DraftTrainerStub
    session: Session | None
    servers: Sequence[str]
    fleet_known: bool
    fleet: RolloutFleet
    lead: bool
    told: dict[str, tuple[str, ...]] = field(default_factory=dict)
    result: SyncResult | None = field(default=None, init=False)
    trainer_silent: bool = field(default=False, init=False)

    def __post_init__(self, version: int) -> None:
        self._push_error: PolicySyncError | None = None
        self._so_far = SyncResult(version)
        self._stage_id = ""
        self._prepared = False
        self._send_weights: Callable[[], None] | None = None
        self._listed: frozenset[str] = frozenset()

    def __enter__(self) -> SyncWindow:
        if not self.lead:
            return self
        if self.session is None:
            self._add_draft_error(f"the draft trainer at {self.config.trainer} is not reached")
            return self
        started = time.monotonic()
        try:
            response = self.trainer.PrepareSync(
                pb.PrepareSyncRequest(
                    session_id=self.session.session_id, policy_version=self._so_far.policy_version
                ),
                timeout=self.config.sync_seconds,
            )
            self._prepared = True
            self._add_draft_errors(response.servers)
            named = tuple(outcome.address for outcome in response.servers)
            if named and not self.config.rollout_servers:
                self.told.clear()
                self.told[self.session.session_id] = self.servers = named
        except grpc.RpcError as error:
            self._trainer_error("PrepareSync", error)
        self._so_far = replace(self._so_far, prepare_seconds=time.monotonic() - started)
        return self

    def push_policy(self, source: nn.Module | Tensors | None = None) -> None:
        """Stage the policy on every rollout server; it becomes live when the window ends.

        Every byte goes through gRPC, hashed on both sides, and from host memory to the device while
        the engine stands still: for small models. ``push_external`` is for the others.

        Where the bridge takes its server list from the trainer and did not reach it yet, the push
        waits: ``result.policy_waits`` is set, and the next ``sync`` pushes the next version if the
        trainer is there by then.

        Args:
            source: a model, its state dict, or tensors named as in the served checkpoint; None:
                the model that the bridge was built with, whose names a state dict has. PEFT's LoRA
                adapters are merged into copies (``lora``). Floating tensors are cast as
                ``policy_dtype`` says; tensors tied to one before them are left out.

        Raises:
            RefusedError: there is no rollout server, the policy was pushed already, another
                process leads, the weights are spread over ranks, or adapters cannot be merged.
            PolicySyncError: a server did not take it; the window then aborts.
        """
        source = self.model if source is None else source
        _check_whole(source)
        self._check_push("push_policy")
        if not self.servers and not self.fleet_known:
            _plain_state(source, self.model)  # refuses adapters here, not in a later ``sync``
            self._so_far = replace(self._so_far, policy_waits=True)
            return
        self._stage(lambda: policy_tensors(source, self.config.policy_dtype, self.model))

    def push_external(self, update: Mapping[str, object], send: Callable[[], None]) -> None:
        """Have every rollout server receive the policy through vLLM's own weight-transfer engine.

        The window's end commits policy and draft in one worker call on every server: the engine's
        session from start to end, then the draft. ``send`` runs beside these commits.

        Args:
            update: what the engine's ``update_weights`` takes (JSON). The servers were started with
                ``--weight-transfer-config``, and the framework has initialised their engines.
            send: sends the weights to all of these servers, in this thread. It needs a deadline of
                its own, and to raise then: a server that fails its commit receives nothing, which
                is an error only after ``send`` has ended.

        Raises:
            RefusedError, PolicySyncError: as ``push_policy``; a server cannot receive. Once where
                the servers are others than at the last call: the engines' group is of those.
        """
        self._check_push("push_external")
        before, self.fleet.receivers = self.fleet.receivers, frozenset(self.servers)
        if before and before != self.fleet.receivers:
            found = ", ".join(sorted(self.servers))
            expected = f"those of the last push: {', '.join(sorted(before))}"
            step = "initialise their weight-transfer engines again, then push again"
            raise RefusedError("rollout_servers", found, expected, step)
        transfer_update = json.dumps(update)
        self._send_weights = send
        self._stage(dict, transfer_update)

    def _check_push(self, method: str) -> None:
        if not self.lead:
            raise RefusedError(method, "lead=False", "the process that leads", "push there")
        if self._stage_id or self._so_far.policy_waits:
            raise RefusedError(method, "a second call", "one per window", "push once")
        if not self.servers and (self.fleet_known or method != "push_policy"):
            found, step = "none, neither configured nor from the trainer", "set it in BridgeConfig"
            raise RefusedError("rollout_servers", found, "at least one", step)

    def _stage(self, tensors: Callable[[], Tensors], transfer_update: str = "") -> None:
        started = time.monotonic()
        made, version = tensors(), self._so_far.policy_version
        self._stage_id = f"policy-{version}-{uuid.uuid4().hex[:8]}"
        named, members = frozenset(self.servers), frozenset[str]()
        if not self.config.rollout_servers:
            members = self.fleet.members
        if not transfer_update:
            # The trainer's list may lack, for a moment, a server that generates and answers late.
            self.servers = [*self.servers, *sorted(members - named)]
        self._listed = named
        errors = self.fleet.stage(self.servers, self._stage_id, version, made, transfer_update)
        # The first push finds servers that can never be reached. Later the trainer may name one
        # that still loads its model, and one that it names no more may be gone.
        errors = self._without_unreachable(errors, named ^ members if members else ())
        self._so_far = replace(
            self._so_far, policy_pushed=True, stage_seconds=time.monotonic() - started
        )
        if errors:
            # An unlisted server is asked once: it may be a listed one under its former name.
            self.fleet.members &= named
            self._push_error = PolicySyncError("staged", _texts(errors), self._so_far)
            raise self._push_error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._stage_id and (kind is not None or self._push_error is not None):
                self._abort()
            if kind is None:
                # A caller that swallowed the push's error must not commit half a fleet.
                if self._push_error is not None:
                    raise self._push_error
                self._commit()
        finally:
            self.result = self._so_far

    def _commit(self) -> None:
        if self._send_weights is None:
            self._commit_all()
            return
        with ThreadPoolExecutor(1, "slipstream-commit") as pool:
            commit = pool.submit(self._commit_all)
            # The servers receive inside their commits, which end when all was sent.
            try:
                self._send_weights()
            finally:
                # The commit's error names the server for which ``send`` waited in vain.
                commit.result()

    def _commit_all(self) -> None:
        started = time.monotonic()
        answer = self._call_complete_sync() if self._prepared else None
        live: dict[str, rollout_pb.ServerState] = {}
        failed: Errors = {}
        if self._stage_id:
            live, errors = self.fleet.make_live(
                self.servers, self._stage_id, self._so_far.policy_version
            )
            failed = self._without_unreachable(errors)
        states = (self._read_outcomes(answer) if answer is not None else {}) | live
        self._so_far = replace(
            self._so_far,
            draft_versions={address: state.draft_version for address, state in states.items()},
            commit_seconds=time.monotonic() - started,
        )
        if failed:
            self._abort()
            raise PolicySyncError("committed", _texts(failed), self._so_far)
        if self._stage_id:
            self.fleet.members = self._listed.intersection(self.servers)

    def _call_complete_sync(self) -> grpc.Future:
        """Have the trainer commit. Returns at its answer, or after ``sync_seconds`` without one."""
        assert self.session is not None  # PrepareSync went through it
        request = pb.CompleteSyncRequest(
            session_id=self.session.session_id,
            policy_version=self._so_far.policy_version,
            policy_stage_id=self._stage_id,
        )
        longest = self.config.sync_seconds
        if self._stage_id:
            # Receiving or loading a policy may take longer than this waits for the trainer. The
            # bridge's own commits then queue behind the trainer's and may be answered with them.
            longest += self.config.policy_seconds
        answer: grpc.Future = self.trainer.CompleteSync.future(request, timeout=longest)
        with suppress(grpc.RpcError, grpc.FutureTimeoutError):
            answer.result(self.config.sync_seconds)
        return answer

    def _read_outcomes(self, answer: grpc.Future) -> dict[str, rollout_pb.ServerState]:
        try:
            response = answer.result(ANSWER_SECONDS)
        except grpc.RpcError as error:
            self._trainer_error("CompleteSync", error)
            return {}
        except grpc.FutureTimeoutError:
            answer.cancel()
            self.trainer_silent = True
            self._add_draft_error(f"CompleteSync: no answer {ANSWER_SECONDS:g} s after the commits")
            return {}
        outcomes = response.servers
        self._add_draft_errors(outcomes)
        if self._stage_id and not self.config.rollout_servers:
            # Treated like a server that joins after the window.
            named = {outcome.address for outcome in outcomes}
            joined = dict.fromkeys(named.difference(self.servers), _JOINED)
            self._so_far = replace(self._so_far, left_out={**joined, **self._so_far.left_out})
        return {o.address: o.state for o in outcomes if o.HasField("state")}

    def _add_draft_errors(self, outcomes: Iterable[pb.ServerOutcome]) -> None:
        # Errors, not `committed`: a policy may be committed without its draft.
        for outcome in outcomes:
            if outcome.error:
                self._add_draft_error(f"{outcome.address}: {outcome.error}")

    def _abort(self) -> None:
        errors = self.fleet.abort(self.servers, self._stage_id)
        for address, error in errors.items():
            self._add_draft_error(f"abort at {address}: {describe(error)}")

    def _without_unreachable(self, errors: Errors, joins: Collection[str] = ()) -> Errors:
        """``errors`` without servers that are left out from now on; all if no server would be left.

        A server in ``joins`` is left out whatever the configuration says. An unlisted one is left
        out even if it refuses: it may serve another experiment by now.
        """
        skips, named = self.config.skip_unreachable_servers, self._listed
        gone = {
            address: error
            for address, error in errors.items()
            if address not in named or ((skips or address in joins) and _unreachable(error))
        }
        left = [address for address in self.servers if address not in gone]
        # ``send`` would wait for ever for one that is left out.
        if not left or self._send_weights is not None:
            return errors
        self.servers = left
        self._so_far = replace(self._so_far, left_out={**self._so_far.left_out, **_texts(gone)})
        return {address: error for address, error in errors.items() if address not in gone}

    def _trainer_error(self, call: str, error: grpc.RpcError) -> None:
        late = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        self.trainer_silent = self.trainer_silent or late
        self._add_draft_error(f"{call}: {describe(error)}")

    def _add_draft_error(self, text: str) -> None:
        self._so_far = replace(self._so_far, draft_errors=(*self._so_far.draft_errors, text))


class NullSyncWindow(AbstractContextManager["NullSyncWindow"]):
    """A sync window that does nothing."""

    def __init__(self, version: int) -> None:
        self.result: SyncResult | None = SyncResult(version)

    def __exit__(self, *_: object) -> None:
        return None

    def push_policy(self, source: nn.Module | Mapping[str, torch.Tensor] | None = None) -> None:
        """Raise RefusedError: doing nothing would leave the rollouts on an old policy."""
        step = "sync by the framework's own means"
        raise RefusedError("push_policy", "a disabled bridge", "an enabled one", step)

    def push_external(self, update: Mapping[str, object], send: Callable[[], None]) -> None:
        """Raise RefusedError, as ``push_policy`` does."""
        self.push_policy()


def _texts(errors: Errors) -> dict[str, str]:
    return {address: describe(error) for address, error in errors.items()}


def _unreachable(error: Exception) -> bool:
    """Return whether a server did not answer; a refusal is an answer."""
    if isinstance(error, grpc.Call):
        return refused_from(error) is None and error.code() in SILENT
    return isinstance(error, ConnectionError)


def _check_whole(source: nn.Module | Tensors) -> None:
    """Raise RefusedError for weights that only all ranks together can gather."""
    tensors = source.parameters() if isinstance(source, nn.Module) else source.values()
    for tensor in tensors:
        # One process pushes: gathering there would wait for the others for ever.
        if is_sharded(tensor) and tensor.device_mesh.size() > 1:  # type: ignore[attr-defined]
            found = f"weights that are sharded over {tensor.device_mesh.size()} ranks"  # type: ignore[attr-defined]
            step = (
                "gather them on every rank before the window, as get_model_state_dict does with "
                "full_state_dict=True, and pass that"
            )
            raise RefusedError("push_policy", found, "whole tensors", step)


def policy_tensors(
    source: nn.Module | Tensors, dtype_name: str, model: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """The policy's parameters by checkpoint name, on CPU, floating ones cast to ``dtype_name``.

    Tensors that the policy keeps in float32 beside narrower weights stay float32
    (``model.kept_wide``): a router's bias of 34.5 would move by more than experts differ.

    Of tensors that share their memory (a tied lm_head) only the first is kept, as in a saved
    checkpoint. Wrappers (DDP, torch.compile, checkpointing) are looked through. Sharded parameters
    are gathered one by one, a collective call where there are several ranks, whose parameters
    ``push_policy`` refuses before it comes to this.

    Args:
        source: a model or tensors.
        dtype_name: torch's name without "torch."; empty: as they are.
        model: whose names tensors may have; they then get those of its checkpoint.

    Raises:
        RefusedError: adapters that ``lora.without_adapters`` refuses.
    """
    owner = source if isinstance(source, nn.Module) else model
    state, merges = _plain_state(source, model)
    dtype: torch.dtype | None = getattr(torch, dtype_name) if dtype_name else None
    wide = kept_wide(owner, state) if dtype is not None else set()
    seen: set[tuple[object, ...]] = set()
    tensors = {}
    for name, part in state.items():
        tensor = merges[name]() if name in merges else full_tensor(part)
        # By the shard's memory: a gathered tensor is freed after its cast, and its address reused.
        own = part.to_local() if is_sharded(part) else part  # type: ignore[attr-defined]
        key = (own.device, own.data_ptr(), tensor.shape, own.stride())
        if own.numel() and key in seen:
            continue
        seen.add(key)
        casts = tensor.is_floating_point() and name not in wide
        cast = dtype if casts and dtype is not None else part.dtype
        tensors[name] = tensor.detach().to("cpu", cast)
    return as_stored(owner, tensors)


def _plain_state(
    source: nn.Module | Tensors, model: nn.Module | None
) -> tuple[dict[str, torch.Tensor], dict[str, Merge]]:
    if not isinstance(source, nn.Module):
        return without_adapters(model, source)
    *outer, inner = unwrapped(source)
    state = {plain_name(name): tensor for name, tensor in inner.state_dict().items()}
    plain, merges = without_adapters(source, state)
    if not merges and any("base_model" in dict(each.named_children()) for each in outer):
        step = "merge the adapters and pass their state dict: window.push_policy(merged)"
        raise RefusedError("push_policy", f"{type(source).__name__} without LoRA", "LoRA", step)
    return plain, merges


class TrainerProbe:
    """Asks the trainer for its status without waiting for it. At most one call is in flight.

    A hung trainer would otherwise cost every weight sync its whole deadline. Thread-safe.

    Attributes:
        status: the newest answer; None before the first.
        answered_at: when it came, monotonic seconds.
    """

    def __init__(self, trainer: pb_grpc.DraftTrainerStub, deadline_seconds: float) -> None:
        self._trainer = trainer
        self._deadline = deadline_seconds
        self._lock = threading.Lock()
        self._asked: grpc.Future | None = None
        self._asked_at = -math.inf
        self.status: pb.TrainerStatus | None = None
        self.answered_at = -math.inf

    def send(self) -> None:
        """Start a call; ``answers`` is False until it is answered."""
        self._asked_at = time.monotonic()
        self._asked = self._trainer.GetStatus.future(pb.GetStatusRequest(), timeout=self._deadline)

    def answers(self) -> bool:
        """Return whether the trainer may be called: no call is open, or it was answered."""
        with self._lock:
            if self._asked is None:
                return True
            if not self._asked.done():
                return False
            code = self._asked.code()
            # A refusal is an answer too.
            if code in SILENT:
                self.send()
                return False
            if code is grpc.StatusCode.OK:
                self.status, self.answered_at = self._asked.result(), time.monotonic()
            self._asked = None
            return True

    def poll(self, interval_seconds: float) -> None:
        """Ask for ``status`` again if that was ``interval_seconds`` ago. Call this regularly."""
        if self.answers() and time.monotonic() - self._asked_at >= interval_seconds:
            self.send()

    def close(self) -> None:
        """Cancel the open call."""
        if self._asked is not None:
            self._asked.cancel()
