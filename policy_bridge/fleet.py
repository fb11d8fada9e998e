"""The rollout servers, as the bridge calls them: stage, commit, abort, all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
import torch

from policy_bridge.config import BridgeConfig
from slipstream.client import open_channel, stage
from slipstream.errors import RefusedError, failure_text
from slipstream.tensors import spec_of
from slipstream.v1 import rollout_server_pb2 as rollout_pb
from slipstream.v1 import rollout_server_pb2_grpc as rollout_grpc

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
Errors = dict[str, Exception]
"""Errors by server address."""
SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
"""Statuses of a server that does not answer."""


def describe(error: BaseException) -> str:
    """An error of a peer in one line: its refusal, gRPC's status, or the error's own text."""
    if isinstance(error, grpc.RpcError):
        return failure_text(error)
    return str(error) or type(error).__name__


class RolloutFleet:
    """One connection per rollout server; every call goes to all of them at once.

    Attributes:
        members: servers that the trainer named and that took the last policy whose push succeeded.
        receivers: servers of the last push through vLLM's own weight-transfer engine.
    """

    def __init__(self, config: BridgeConfig) -> None:
        self._config = config
        self.members: frozenset[str] = frozenset()
        self.receivers: frozenset[str] = frozenset()
        self._channels: dict[str, grpc.Channel] = {}

    def stage(
        self,
        addresses: Sequence[str],
        stage_id: str,
        version: int,
        tensors: Tensors,
        transfer_update: str = "",
    ) -> Errors:
        """Stage a policy on every server: tensors, or what vLLM's weight-transfer engine is given.
        Errors by address; empty when all hold it.
        """
        self._close_all_but(addresses)
        external, here = rollout_pb.STAGE_KIND_POLICY_EXTERNAL, rollout_pb.STAGE_KIND_POLICY
        header = rollout_pb.StageHeader(
            stage_id=stage_id,
            kind=external if transfer_update else here,
            version=version,
            tensors=[spec_of(name, tensor) for name, tensor in tensors.items()],
            transfer_update=transfer_update,
        )
        seconds = self._config.policy_seconds

        def one(stub: rollout_grpc.RolloutServerStub) -> rollout_pb.StageResult:
            return stage(stub, header, tensors, timeout=seconds)

        return self._call_each(addresses, one)[1]

    def make_live(
        self, addresses: Sequence[str], stage_id: str, version: int
    ) -> tuple[dict[str, rollout_pb.ServerState], Errors]:
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

        return self._call_each(addresses, one)

    def abort(self, addresses: Sequence[str], stage_id: str) -> Errors:
        """Drop a stage on every server. Errors by address."""
        request = rollout_pb.AbortRequest(stage_ids=[stage_id])
        seconds = self._config.rpc_seconds
        return self._call_each(addresses, lambda stub: stub.Abort(request, timeout=seconds))[1]

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _close_all_but(self, addresses: Sequence[str]) -> None:
        """Close connections to servers that are no longer of the fleet."""
        for address in self._channels.keys() - set(addresses):
            self._channels.pop(address).close()

    def _call_each(
        self, addresses: Sequence[str], call: Callable[[rollout_grpc.RolloutServerStub], T]
    ) -> tuple[dict[str, T], Errors]:
        failed: Errors = {}
        for address in addresses:
            if address not in self._channels:
                try:
                    channel = open_channel(address, credentials=self._config.rollout_credentials)
                except RefusedError as refusal:
                    # The trainer named an address to which the token must not be sent.
                    failed[address] = refusal
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
                failed[address] = error
            else:
                raise error
        return done, failed


def _is_live(state: rollout_pb.ServerState, stage_id: str, version: int) -> bool:
    # A policy that is pushed again keeps its version, so the version alone is not enough.
    return (
        state.HasField("policy_version")
        and state.policy_version == version
        and all(stage.stage_id != stage_id for stage in state.staged)
    )
