"""Options that both ends of every Slipstream connection agree on.

Client side of ``RolloutServer.Stage``: send only the tensors the server lacks.

Lives with the wire because the sidecar stages drafts and the bridge stages
policies, and neither may import the other.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence

import grpc
import torch

from slipstream.security import NONE, ClientCredentials, CredentialedChannel, Shown
from slipstream.tensors import chunks_of, spec_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message either side takes: one sample of 2048 tokens at 32 KiB each."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that was SIGSTOPped or unplugged is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's own patience with a ping is a minute, whatever the timeout above says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found again within about two seconds.
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *OPTIONS,
    # Of one connection: the calls of a client that opens them in a loop wait on its own side.
    ("grpc.max_concurrent_streams", 128),
    # A connection that never speaks HTTP/2 is closed, and so is one that no call used for long;
    # its client connects again when it has one.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # A peer that was starved of its processor answers late and then finds several pings at once.
    # With the usual two strikes an idle stream was ended with "too many pings".
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 8),
    # Two processes on one port would share its connections at random.
    ("grpc.so_reuseport", 0),
)


def server_options(max_message_bytes: int, keepalive_s: float) -> tuple[tuple[str, int], ...]:
    """``SERVER_OPTIONS`` with another largest message, and another pause between pings.

    A client that is gone without a word is noticed after one and a half such pauses.
    """
    return (
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", round(1000 * keepalive_s)),
        ("grpc.keepalive_timeout_ms", round(500 * keepalive_s)),
        ("grpc.http2.ping_timeout_ms", round(500 * keepalive_s)),
    )


def open_channel(
    address: str, *, credentials: ClientCredentials = NONE, own_connection: bool = False
) -> grpc.Channel:
    """A lazy channel to ``host:port``; connects on the first call.

    Args:
        address: of the server.
        credentials: to show, and to know the server by.
        own_connection: share no connection with other channels to it. A small call then
            does not wait behind what a slow reader has not read of a large one.

    Raises:
        RefusedError: a file of ``credentials`` cannot be used, or its token would cross a network
            without TLS.
    """
    own = (("grpc.use_local_subchannel_pool", 1),) if own_connection else ()
    options: tuple[tuple[str, int | str], ...] = (*OPTIONS, *own)
    if credentials.empty:
        return grpc.insecure_channel(address, options=options)
    credentials.check_address(address, "address")
    if credentials.server_name:
        options = (*options, ("grpc.ssl_target_name_override", credentials.server_name))

    def connect(tls: grpc.ChannelCredentials | None) -> grpc.Channel:
        if tls is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, tls, options=options)

    return CredentialedChannel(Shown(credentials), connect)


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
        grpc.RpcError: refused (see ``slipstream.errors``), unreachable or too late.
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
