"""Client side of ``RolloutServer.Stage``: send only the tensors the server lacks.

Lives with the wire because the sidecar stages drafts and the bridge stages
policies, and neither may import the other.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence

import torch

from slipstream.tensors import chunks_of, spec_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2


def stage(
    stub: pb_grpc.RolloutServerStub,
    *,
    stage_id: str,
    kind: int,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    specs: Sequence[tensor_pb2.TensorSpec] | None = None,
    trained_against_policy_version: int | None = None,
    timeout: float,
) -> pb.StageResult:
    """Stage ``tensors`` on one rollout server and wait until it holds them.

    Args:
        stub: the server.
        stage_id: the name it is committed or aborted by.
        kind: ``STAGE_KIND_DRAFT`` or ``STAGE_KIND_POLICY``.
        version: draft version or policy version.
        tensors: parameters by checkpoint name, any shape, CPU.
        specs: their specs if they are known already (hashing takes time).
        trained_against_policy_version: for a draft.
        timeout: seconds for the whole exchange.

    Raises:
        grpc.RpcError: refused (see ``slipstream.refusal``), unreachable or too late.
    """
    header = pb.StageHeader(
        stage_id=stage_id,
        kind=kind,  # type: ignore[arg-type]
        version=version,
        trained_against_policy_version=trained_against_policy_version,
        tensors=specs
        if specs is not None
        else [spec_of(name, tensor) for name, tensor in tensors.items()],
    )
    needed: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()

    def requests() -> Iterator[pb.StageRequest]:
        yield pb.StageRequest(header=header)
        names = needed.get(timeout=timeout)
        if names is None:
            return
        for chunk in chunks_of({name: tensors[name] for name in names}):
            yield pb.StageRequest(chunk=chunk)

    try:
        for response in stub.Stage(requests(), timeout=timeout):
            if response.WhichOneof("kind") == "needed":
                needed.put(list(response.needed.names))
            else:
                return response.staged
    finally:
        # Lets gRPC's request thread end when the call failed before "needed".
        needed.put(None)
    raise ConnectionError(f"{stage_id}: the server ended the stage without a result")
