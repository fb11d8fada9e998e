"""The rollout servers, as the bridge needs them: stage the policy, make it live, read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
import torch

from policy_bridge.errors import describe
from slipstream.channel import open_channel
from slipstream.credentials import NONE, ClientCredentials
from slipstream.refusal import RefusedError
from slipstream.staging import stage
from slipstream.tensors import spec_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

T = TypeVar("T")


class RolloutFleet:
    """One connection per rollout server; every call goes to all of them at once.

    Args:
        policy_seconds: deadline of a stage and of a commit.
        rpc_seconds: deadline of everything else.
        credentials: shown to every server.
    """

    def __init__(
        self, policy_seconds: float, rpc_seconds: float, credentials: ClientCredentials = NONE
    ) -> None:
        self._credentials = credentials
        self._policy_seconds = policy_seconds
        self._rpc_seconds = rpc_seconds
        self._channels: dict[str, grpc.Channel] = {}

    def stage(
        self,
        addresses: Sequence[str],
        stage_id: str,
        version: int,
        tensors: Mapping[str, torch.Tensor],
    ) -> dict[str, str]:
        """Stage a policy everywhere. Errors by address; empty when all hold it."""
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]

        def one(stub: pb_grpc.RolloutServerStub) -> pb.StageResult:
            return stage(
                stub,
                stage_id=stage_id,
                kind=pb.STAGE_KIND_POLICY,
                version=version,
                tensors=tensors,
                specs=specs,
                timeout=self._policy_seconds,
            )

        return self._each(addresses, one)[1]

    def make_live(
        self, addresses: Sequence[str], stage_id: str, version: int
    ) -> tuple[dict[str, pb.ServerState], dict[str, str]]:
        """Commit a staged policy wherever it is not live yet.

        Each server is asked first and, when its commit fails, asked again: the
        trainer may have committed it, or be about to, although its answer was lost.

        Returns:
            States of the servers that serve it, and errors of those that do not.
        """

        def one(stub: pb_grpc.RolloutServerStub) -> pb.ServerState:
            state = stub.GetState(pb.GetStateRequest(), timeout=self._rpc_seconds)
            if _is_live(state, stage_id, version):
                return state
            try:
                request = pb.CommitRequest(stage_ids=[stage_id])
                return stub.Commit(request, timeout=self._policy_seconds).state
            except grpc.RpcError:
                state = stub.GetState(pb.GetStateRequest(), timeout=self._rpc_seconds)
                if _is_live(state, stage_id, version):
                    return state
                raise

        return self._each(addresses, one)

    def abort(self, addresses: Sequence[str], stage_id: str) -> dict[str, str]:
        """Forget a stage everywhere. Errors by address."""

        def one(stub: pb_grpc.RolloutServerStub) -> pb.AbortResponse:
            return stub.Abort(pb.AbortRequest(stage_ids=[stage_id]), timeout=self._rpc_seconds)

        return self._each(addresses, one)[1]

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _each(
        self, addresses: Sequence[str], call: Callable[[pb_grpc.RolloutServerStub], T]
    ) -> tuple[dict[str, T], dict[str, str]]:
        failed: dict[str, str] = {}
        for address in addresses:
            if address not in self._channels:
                try:
                    channel = open_channel(address, credentials=self._credentials)
                except RefusedError as refusal:
                    # The trainer named it, and the token must not go there.
                    failed[address] = str(refusal)
                    continue
                self._channels[address] = channel
        with ThreadPoolExecutor(max(1, len(addresses)), "slipstream-fleet") as pool:
            futures = {
                address: pool.submit(call, pb_grpc.RolloutServerStub(self._channels[address]))
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


def _is_live(state: pb.ServerState, stage_id: str, version: int) -> bool:
    # The number alone does not do: a policy that is pushed again keeps its number.
    return (
        state.HasField("policy_version")
        and state.policy_version == version
        and stage_id not in state.staged
    )
