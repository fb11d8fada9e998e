"""The policy's weight sync: the draft is staged before it and committed with it.

The policy does not depend on the trainer: when the trainer is absent or late, the bridge commits
the policy itself. It does depend on the rollout servers: a server that does not take the policy is
an error to the caller, because training on rollouts of a stale policy would go unnoticed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field, replace
from typing import TypeVar

import grpc
import torch
from torch import nn

from policy_bridge.config import BridgeConfig
from policy_bridge.model import full_tensor, plain_name, unwrapped
from policy_bridge.session import Session
from policy_bridge.stats import SyncResult
from slipstream.client import open_channel, stage
from slipstream.errors import RefusedError, failure_text
from slipstream.tensors import spec_of
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import rollout_server_pb2 as rollout_pb
from slipstream.v1 import rollout_server_pb2_grpc as rollout_grpc

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]


def describe(error: BaseException) -> str:
    """An error of a peer in one line: its refusal, gRPC's status, or the error's own text."""
    if isinstance(error, grpc.RpcError):
        return failure_text(error)
    return str(error) or type(error).__name__


class RolloutFleet:
    """One connection per rollout server; every call goes to all of them at once."""

    def __init__(self, config: BridgeConfig) -> None:
        self._config = config
        self._channels: dict[str, grpc.Channel] = {}

    def stage(
        self, addresses: Sequence[str], stage_id: str, version: int, tensors: Tensors
    ) -> dict[str, str]:
        """Stage a policy on every server. Errors by address; empty when all hold it."""
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]

        def one(stub: rollout_grpc.RolloutServerStub) -> rollout_pb.StageResult:
            return stage(
                stub,
                stage_id=stage_id,
                kind=rollout_pb.STAGE_KIND_POLICY,
                version=version,
                tensors=tensors,
                specs=specs,
                timeout=self._config.policy_seconds,
            )

        return self._each(addresses, one)[1]

    def make_live(
        self, addresses: Sequence[str], stage_id: str, version: int
    ) -> tuple[dict[str, rollout_pb.ServerState], dict[str, str]]:
        """Commit a staged policy wherever it is not live yet.

        Each server's state is read first and, when its commit fails, again: the trainer may have
        committed the policy, or be about to, although its answer was lost.

        Returns:
            States of the servers that serve it, and errors of those that do not.
        """

        def state_of(stub: rollout_grpc.RolloutServerStub) -> rollout_pb.ServerState:
            return stub.GetState(rollout_pb.GetStateRequest(), timeout=self._config.rpc_seconds)

        def one(stub: rollout_grpc.RolloutServerStub) -> rollout_pb.ServerState:
            state = state_of(stub)
            if _is_live(state, stage_id, version):
                return state
            try:
                request = rollout_pb.CommitRequest(stage_ids=[stage_id])
                return stub.Commit(request, timeout=self._config.policy_seconds).state
            except grpc.RpcError:
                state = state_of(stub)
                if _is_live(state, stage_id, version):
                    return state
                raise

        return self._each(addresses, one)

    def abort(self, addresses: Sequence[str], stage_id: str) -> dict[str, str]:
        """Drop a stage on every server. Errors by address."""
        request = rollout_pb.AbortRequest(stage_ids=[stage_id])
        seconds = self._config.rpc_seconds
        return self._each(addresses, lambda stub: stub.Abort(request, timeout=seconds))[1]

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _each(
        self, addresses: Sequence[str], call: Callable[[rollout_grpc.RolloutServerStub], T]
    ) -> tuple[dict[str, T], dict[str, str]]:
        failed: dict[str, str] = {}
        for address in addresses:
            if address not in self._channels:
                try:
                    channel = open_channel(address, credentials=self._config.rollout_credentials)
                except RefusedError as refusal:
                    # An address from the trainer to which the token must not go.
                    failed[address] = str(refusal)
                    continue
                self._channels[address] = channel
        with ThreadPoolExecutor(max(1, len(addresses)), "slipstream-fleet") as pool:
            futures = {
                address: pool.submit(call, rollout_grpc.RolloutServerStub(self._channels[address]))
                for address in addresses
                if address not in failed
            }
        done: dict[str, T] = {}
        for address, future in futures.items():
            error = future.exception()
            if error is None:
                done[address] = future.result()
            elif isinstance(error, grpc.RpcError | ConnectionError):
                failed[address] = describe(error)
            else:
                raise error
        return done, failed


def _is_live(state: rollout_pb.ServerState, stage_id: str, version: int) -> bool:
    # A policy that is pushed again keeps its version, so the version alone is not enough.
    return (
        state.HasField("policy_version")
        and state.policy_version == version
        and stage_id not in state.staged
    )


class PolicySyncError(RuntimeError):
    """At least one rollout server did not take the policy.

    Attributes:
        errors: by server address.
        result: what was reached before it.
    """

    def __init__(self, stage: str, errors: Mapping[str, str], result: SyncResult) -> None:
        self.errors = dict(errors)
        self.result = result
        texts = "; ".join(f"{address}: {text}" for address, text in errors.items())
        super().__init__(
            f"policy version {result.policy_version} was not {stage} on {len(errors)} rollout "
            f"server(s): {texts}. Next step: see to those servers, then sync again"
        )


@dataclass(eq=False)
class SyncWindow:
    """``with bridge.sync(version) as window: ...``

    Attributes:
        version: of the policy.
        model: whose weights ``push_policy`` pushes by default.
        config: of the bridge.
        trainer: the sidecar.
        session: its open run; None while it cannot be reached.
        servers: host:port of every rollout server.
        fleet: the connections to them.
        lead: whether this process stages the draft and pushes the policy.
        result: what was done; set at the end of the window.
        trainer_silent: whether the trainer let a deadline pass.
    """

    version: InitVar[int]
    model: nn.Module
    config: BridgeConfig
    trainer: pb_grpc.DraftTrainerStub
    session: Session | None
    servers: Sequence[str]
    fleet: RolloutFleet
    lead: bool
    result: SyncResult | None = field(default=None, init=False)
    trainer_silent: bool = field(default=False, init=False)

    def __post_init__(self, version: int) -> None:
        self._push_error: PolicySyncError | None = None
        self._so_far = SyncResult(version)
        self._stage_id = ""
        self._prepared = False

    def __enter__(self) -> SyncWindow:
        if not self.lead:
            return self
        if self.session is None:
            self._draft_error(f"the draft trainer at {self.config.trainer} is not reached")
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
            self._keep_errors(response.servers)
        except grpc.RpcError as error:
            self._trainer_error("PrepareSync", error)
        self._so_far = replace(self._so_far, prepare_seconds=time.monotonic() - started)
        return self

    def push_policy(self, source: nn.Module | Tensors | None = None) -> None:
        """Stage the policy on every rollout server; it becomes live when the window ends.

        Args:
            source: a model or its state dict, named as vLLM's checkpoint loader expects;
                None: the model that the bridge was built with. Floating tensors are cast
                to ``policy_dtype``; tensors tied to one before them are left out.

        Raises:
            RefusedError: no rollout server is known, the policy was pushed already, or
                another process leads.
            PolicySyncError: a server did not take it; the window then aborts.
        """
        if not self.lead:
            raise RefusedError("push_policy", "lead=False", "the process that leads", "push there")
        if self._stage_id:
            raise RefusedError("push_policy", "a second call", "one per window", "push once")
        if not self.servers:
            found = "none, neither in the configuration nor from the trainer"
            raise RefusedError("rollout_servers", found, "at least one", "set it in BridgeConfig")
        started = time.monotonic()
        tensors = policy_tensors(self.model if source is None else source, self.config.policy_dtype)
        version = self._so_far.policy_version
        self._stage_id = f"policy-{version}-{uuid.uuid4().hex[:8]}"
        errors = self.fleet.stage(self.servers, self._stage_id, version, tensors)
        self._so_far = replace(
            self._so_far, policy_pushed=True, stage_seconds=time.monotonic() - started
        )
        if errors:
            self._push_error = PolicySyncError("staged", errors, self._so_far)
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
        started = time.monotonic()
        states: dict[str, rollout_pb.ServerState] = {}
        if self._prepared:
            states.update(self._complete())
        failed: dict[str, str] = {}
        if self._stage_id:
            live, failed = self.fleet.make_live(
                self.servers, self._stage_id, self._so_far.policy_version
            )
            states.update(live)
        self._so_far = replace(
            self._so_far,
            draft_versions={address: state.draft_version for address, state in states.items()},
            commit_seconds=time.monotonic() - started,
        )
        if failed:
            self._abort()
            raise PolicySyncError("committed", failed, self._so_far)

    def _complete(self) -> dict[str, rollout_pb.ServerState]:
        assert self.session is not None  # PrepareSync went through it
        try:
            response = self.trainer.CompleteSync(
                pb.CompleteSyncRequest(
                    session_id=self.session.session_id,
                    policy_version=self._so_far.policy_version,
                    policy_stage_id=self._stage_id,
                ),
                timeout=self.config.sync_seconds,
            )
        except grpc.RpcError as error:
            self._trainer_error("CompleteSync", error)
            return {}
        outcomes = response.result.servers
        self._keep_errors(outcomes)
        return {o.address: o.state for o in outcomes if o.HasField("state")}

    def _keep_errors(self, outcomes: Iterable[pb.ServerOutcome]) -> None:
        # Errors, not `committed`: a policy may be committed without its draft.
        for outcome in outcomes:
            if outcome.error:
                self._draft_error(f"{outcome.address}: {outcome.error}")

    def _abort(self) -> None:
        errors = self.fleet.abort(self.servers, self._stage_id)
        for address, text in errors.items():
            self._draft_error(f"abort at {address}: {text}")

    def _trainer_error(self, call: str, error: grpc.RpcError) -> None:
        late = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        self.trainer_silent = self.trainer_silent or late
        self._draft_error(f"{call}: {describe(error)}")

    def _draft_error(self, text: str) -> None:
        self._so_far = replace(self._so_far, draft_errors=(*self._so_far.draft_errors, text))


def policy_tensors(source: nn.Module | Tensors, dtype_name: str) -> dict[str, torch.Tensor]:
    """The policy's parameters by checkpoint name, on CPU, floating ones cast to ``dtype_name``.

    Of tensors that share their memory (a tied lm_head) only the first is kept, as in a saved
    checkpoint. Wrappers (DDP, torch.compile, checkpointing) are looked through. Sharded parameters
    are gathered one by one, which is a collective call: every rank makes it.

    Raises:
        RefusedError: a PEFT model, whose names and base weights are not the policy's.
    """
    state = _plain_state(source) if isinstance(source, nn.Module) else source
    dtype: torch.dtype | None = getattr(torch, dtype_name) if dtype_name else None
    seen: set[tuple[object, ...]] = set()
    tensors = {}
    for name, part in state.items():
        tensor = full_tensor(part)
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        cast = dtype if tensor.is_floating_point() and dtype is not None else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", cast)
    return tensors


def _plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    for inner in unwrapped(model):
        if "base_model" in dict(inner.named_children()):
            found = f"{type(inner).__name__} with adapters"
            step = "merge the adapters and pass their state dict: window.push_policy(merged)"
            raise RefusedError("push_policy", found, "weights by the base model's names", step)
        model = inner
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}


_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class TrainerProbe:
    """Finds out whether a silent trainer answers again, without waiting for it.

    A hung trainer would otherwise cost every weight sync its whole deadline. At most one call is
    in flight. Used from one thread.
    """

    def __init__(self, trainer: pb_grpc.DraftTrainerStub, deadline_seconds: float) -> None:
        self._trainer = trainer
        self._deadline = deadline_seconds
        self._asked: grpc.Future | None = None

    def send(self) -> None:
        """Start a call; ``answers`` is False until it is answered."""
        self._asked = self._trainer.GetStatus.future(pb.GetStatusRequest(), timeout=self._deadline)

    def answers(self) -> bool:
        """Whether the trainer may be called: no call is open, or it was answered."""
        if self._asked is None:
            return True
        if not self._asked.done():
            return False
        # A refusal is an answer too.
        if self._asked.code() in _SILENT:
            self.send()
            return False
        self._asked = None
        return True

    def close(self) -> None:
        """Cancel the open call."""
        if self._asked is not None:
            self._asked.cancel()
