"""The gRPC face of the control plane (``RolloutServer`` of rollout_server.proto).

Takes one stage: what is missing, its chunks, its verification.

Memory is bounded: room in the store is set aside before the first byte, and a
tensor leaves the heap as soon as it is complete and verified.

Owns the control plane's gRPC server inside the API server's event loop.

What stands before every call of the control plane: size, rate, number, and patience.

Every method is registered as one that takes a stream: only so does its handler get to say how long
its one request may take, and that a request could not be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollout_server.acceptance import AcceptanceGuard, AcceptanceTracker
from rollout_server.checkpoint import Expected, TensorLayout, check_finite
from rollout_server.control import ACCEPTANCE, DRAFT, POLICY, RolloutControl, Weights
from rollout_server.engine import Engine
from rollout_server.reload import Result
from rollout_server.store import ContentStore, Key, Reservation, StagedTensor, WeightSource
from slipstream.client import SERVER_OPTIONS
from slipstream.errors import RefusedError, trailing_metadata_of
from slipstream.security import Access, AioAccessInterceptor
from slipstream.serving import (
    CHUNK_MESSAGE_BYTES,
    CallRate,
    Limit,
    Places,
    RefusedCalls,
    Unreadable,
    not_implemented,
    reader,
    silent,
)
from slipstream.tensors import ChunkAssembler, dtype_from_wire
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2

MAX_ID_CHARACTERS = 256

_KINDS = {pb.STAGE_KIND_DRAFT: DRAFT, pb.STAGE_KIND_POLICY: POLICY}


def kind_of(header: pb.StageHeader) -> str:
    """``DRAFT`` or ``POLICY``. Raises RefusedError for anything else, or without an id."""
    if header.kind not in _KINDS:
        raise RefusedError(
            "kind", header.kind, "STAGE_KIND_DRAFT or STAGE_KIND_POLICY", "say what it replaces"
        )
    if not header.stage_id:
        raise RefusedError("stage_id", "empty", "a name such as draft-7", "choose one")
    if len(header.stage_id) > MAX_ID_CHARACTERS:
        # It is in every ServerState: sixteen long ones made that too large for anybody to read.
        raise RefusedError(
            "stage_id",
            f"{len(header.stage_id)} characters",
            f"at most {MAX_ID_CHARACTERS}",
            "choose a name such as draft-7",
        )
    return _KINDS[header.kind]


def key_of(spec: tensor_pb2.TensorSpec) -> Key:
    """A tensor's place in the content store. Raises RefusedError: not a SHA-256."""
    dtype = dtype_from_wire(spec.dtype, spec.name)
    # Refuses a digest of another length and negative sizes.
    ChunkAssembler([spec], max_bytes=1 << 62)
    size = dtype.itemsize
    for length in spec.shape:
        size *= length
    return Key(spec.sha256.hex(), str(dtype).removeprefix("torch."), size)


def layout_of(spec: tensor_pb2.TensorSpec) -> TensorLayout:
    """A spec's dtype and shape."""
    return TensorLayout(key_of(spec).dtype, tuple(spec.shape))


def weights_of(
    kind: str,
    version: int,
    specs: Sequence[tensor_pb2.TensorSpec],
    store: ContentStore,
    *,
    stage_id: str = "",
    trained_against: int | None = None,
) -> Weights:
    """The weights that ``specs`` name, as they will be in the store."""
    keys = [key_of(spec) for spec in specs]
    tensors = (
        StagedTensor(spec.name, key, tuple(spec.shape), str(store.path(key)))
        for spec, key in zip(specs, keys, strict=True)
    )
    source = WeightSource(tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)))
    return Weights(kind, version, source, stage_id, trained_against)


class Upload:
    """The missing tensors of one stage, while they arrive.

    Use as a context: on leaving it without ``keep``, what arrived is forgotten.

    Args:
        specs: every tensor of the stage.
        expected: what they must look like.
        store: where they go.

    Raises:
        RefusedError: they do not fit the model or the store.
    """

    def __init__(
        self, specs: Sequence[tensor_pb2.TensorSpec], expected: Expected, store: ContentStore
    ) -> None:
        expected.check(specs)
        self._store = store
        self._keys = {spec.name: key_of(spec) for spec in specs}
        self._missing: dict[str, tensor_pb2.TensorSpec] = {}
        contents: set[Key] = set()
        for spec in specs:
            key = self._keys[spec.name]
            if key not in store and key not in contents:
                self._missing[spec.name] = spec
                contents.add(key)
        self.needed = list(self._missing)
        self._arriving: dict[str, ChunkAssembler] = {}
        self._arrived: list[Key] = []
        self._keep = False
        self._reservation = Reservation(0)
        self.bytes_received = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Holds the room and the content while the upload lasts."""
        keys = list(self._keys.values())
        self._store.retain(keys)
        try:
            with self._store.reserve(self.needed_bytes) as reservation:
                self._reservation = reservation
                yield
        finally:
            self._store.release(keys)
            if not self._keep:
                self._store.drop(self._arrived)

    @property
    def needed_bytes(self) -> int:
        """Of all that was missing at first."""
        return sum(self._keys[name].size for name in self.needed)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing any more."""
        return not self._missing

    async def feed(self, chunk: tensor_pb2.TensorChunk) -> None:
        """Take one chunk. Raises RefusedError: unasked for, damaged, or not finite."""
        if chunk.name not in self._missing:
            raise RefusedError(
                "chunk.name",
                chunk.name,
                f"one of the names in StageNeeded that is not complete ({len(self._missing)})",
                "send only what is needed, once",
            )
        spec = self._missing[chunk.name]
        if chunk.name not in self._arriving:
            self._arriving[chunk.name] = ChunkAssembler([spec], self._keys[chunk.name].size)
        assembler = self._arriving[chunk.name]
        assembler.feed(chunk)
        self.bytes_received += len(chunk.data)
        if assembler.bytes_received == self._keys[chunk.name].size:
            await self._store_one(spec, assembler)

    async def finish(self) -> None:
        """The sender has no more. Raises RefusedError if a tensor is short."""
        for name, spec in list(self._missing.items()):
            assembler = self._arriving.get(name) or ChunkAssembler([spec], self._keys[name].size)
            await self._store_one(spec, assembler)

    def keep(self) -> None:
        """The stage was accepted."""
        self._keep = True

    async def _store_one(self, spec: tensor_pb2.TensorSpec, assembler: ChunkAssembler) -> None:
        key = self._keys[spec.name]
        # Hashing and writing would hold up the API server's event loop.
        await asyncio.to_thread(_verify_and_write, spec, assembler, self._store, key)
        self._store.add(key, self._reservation)
        self._arrived.append(key)
        del self._missing[spec.name]
        self._arriving.pop(spec.name, None)


def _verify_and_write(
    spec: tensor_pb2.TensorSpec, assembler: ChunkAssembler, store: ContentStore, key: Key
) -> None:
    tensor = assembler.finish()[spec.name]
    check_finite(spec.name, tensor)
    store.write(key, tensor)


def ingest(
    tensors: dict[str, torch.Tensor], specs: Sequence[tensor_pb2.TensorSpec], store: ContentStore
) -> None:
    """Put a checkpoint's tensors into the store, as if they had been staged.

    Raises:
        RefusedError: no room, or a value that is not finite.
    """
    for spec in specs:
        key = key_of(spec)
        if key in store:
            continue
        check_finite(spec.name, tensors[spec.name])
        with store.reserve(key.size) as reservation:
            store.write(key, tensors[spec.name])
            store.add(key, reservation)
        store.retain([key])


def refuse_shared(shared: Sequence[str]) -> None:
    """Refuse to stage while draft and verifier share memory (see ``aliasing``)."""
    if shared:
        raise RefusedError(
            "draft parameters in the verifier's memory",
            ", ".join(shared),
            "none but embed_tokens",
            "restart the server with a draft whose checkpoint has its own lm_head",
            grpc.StatusCode.FAILED_PRECONDITION,
        )


CHUNK_SECONDS = 60.0
"""Longest wait for a client's next message while it stages."""

STAGE_BYTES_PER_SECOND = 8 << 20
"""A stage takes ``CHUNK_SECONDS`` and what its bytes take at this rate, at most: it has room in the
store from its start on, and a byte a minute would keep it there for ever."""

_IDLE_SECONDS = 5.0
_T = TypeVar("_T")


class RolloutService(pb_grpc.RolloutServerServicer):
    """Translates between messages and ``RolloutControl``; refusals become statuses.

    Args:
        control: the state.
        engine: asked about shared memory before a stage is taken.
        store: where staged tensors go.
        tracker: acceptance counters.
        expected: what a stage must look like, by kind.
    """

    def __init__(
        self,
        control: RolloutControl,
        engine: Engine,
        store: ContentStore,
        tracker: AcceptanceTracker,
        expected: Mapping[str, Expected],
    ) -> None:
        self._control = control
        self._engine = engine
        self._store = store
        self._tracker = tracker
        self._expected = expected

    async def Stage(  # noqa: N802 (gRPC's name)
        self, request_iterator: AsyncIterator[pb.StageRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StageResponse]:
        start = time.perf_counter()
        try:
            header = await _header(request_iterator)
            kind = kind_of(header)
            weights = weights_of(
                kind,
                header.version,
                header.tensors,
                self._store,
                stage_id=header.stage_id,
                trained_against=header.trained_against_policy_version
                if kind == DRAFT and header.HasField("trained_against_policy_version")
                else None,
            )
            held = self._control.already_staged(weights)
            upload = Upload(header.tensors, self._expected[kind], self._store)
            if not held:
                refuse_shared((await self._engine.describe()).shared)
            end = start + CHUNK_SECONDS + upload.needed_bytes / STAGE_BYTES_PER_SECOND
            with upload.opened():
                yield pb.StageResponse(needed=pb.StageNeeded(names=upload.needed))
                while not upload.complete:
                    request = await _next(request_iterator, end - time.perf_counter())
                    if request is None:
                        await upload.finish()
                    elif request.WhichOneof("kind") != "chunk":
                        raise RefusedError(
                            "kind", "another header", "a chunk", "open a stream per stage"
                        )
                    else:
                        await upload.feed(request.chunk)
                self._control.add_stage(weights)
                upload.keep()
            staged = time.perf_counter()
            not_prepared = await self._control.prepare(weights)
        except RefusedError as error:
            await _abort(context, error)
        end = time.perf_counter()
        yield pb.StageResponse(
            staged=pb.StageResult(
                stage_id=header.stage_id,
                bytes_received=upload.bytes_received,
                seconds=end - start,
                prepare_seconds=end - staged,
                not_prepared=not_prepared,
            )
        )

    async def Commit(  # noqa: N802
        self, request: pb.CommitRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        return await self._answer(self._control.commit(request.stage_ids), context)

    async def RollBack(  # noqa: N802
        self, request: pb.RollBackRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        return await self._answer(self._control.roll_back(), context)

    async def SetSpeculation(  # noqa: N802
        self, request: pb.SetSpeculationRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        return await self._answer(self._control.set_speculation(request.enabled), context)

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        self._control.abort(request.stage_ids)
        return pb.AbortResponse()

    async def GetState(  # noqa: N802
        self, request: pb.GetStateRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerState:
        if request.read_back:
            try:
                await self._control.read_back()
            except RefusedError as error:
                await _abort(context, error)
        return self._control.state()

    async def WatchAcceptance(  # noqa: N802
        self, request: pb.WatchAcceptanceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AcceptanceReport]:
        interval = (request.min_interval_ms or 1000) / 1000
        while True:
            yield self._report()
            await asyncio.sleep(interval)
            # Cancelled by gRPC when the client leaves or the server stops.
            while not await self._tracker.changed(_IDLE_SECONDS):
                pass

    def _report(self) -> pb.AcceptanceReport:
        return pb.AcceptanceReport(
            state=self._control.state(),
            counters=[
                pb.AcceptanceCounters(
                    draft_version=version,
                    drafts=counters.drafts,
                    draft_tokens=counters.draft_tokens,
                    accepted_tokens=counters.accepted_tokens,
                    accepted_per_position=counters.accepted_per_position,
                )
                for version, counters in self._tracker.counters().items()
            ],
        )

    async def _answer(
        self, change: Awaitable[Result], context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        try:
            took = await change
        except RefusedError as error:
            await _abort(context, error)
        return pb.CommitResponse(
            state=self._control.state(), seconds=took.seconds, worker_seconds=took.worker_seconds
        )


async def _header(requests: AsyncIterator[pb.StageRequest]) -> pb.StageHeader:
    first = await _next(requests)
    if first is None or first.WhichOneof("kind") != "header":
        raise RefusedError(
            "kind",
            "nothing" if first is None else first.WhichOneof("kind"),
            "a header as the first message",
            "send StageHeader first",
        )
    return first.header


async def _next(requests: AsyncIterator[_T], left: float = CHUNK_SECONDS) -> _T | None:
    """The client's next message; None at its end.

    Args:
        left: seconds that the whole stage may still take.

    Raises:
        RefusedError: it sent nothing for ``CHUNK_SECONDS``, or too little until now.
    """
    try:
        return await asyncio.wait_for(anext(requests, None), max(min(left, CHUNK_SECONDS), 0.0))
    except TimeoutError as error:
        slow = left < CHUNK_SECONDS
        raise RefusedError(
            "stream",
            f"less than {STAGE_BYTES_PER_SECOND} bytes a second"
            if slow
            else f"nothing for {CHUNK_SECONDS:.0f} s",
            "the next chunk",
            "stage again",
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ) from error


async def _abort(context: Any, error: RefusedError) -> NoReturn:
    await context.abort(error.code, error.for_wire(), trailing_metadata_of(error))
    raise AssertionError("abort returned")


SERVICE = pb.DESCRIPTOR.services_by_name["RolloutServer"].full_name

MESSAGE_SECONDS = 30.0
"""Longest wait for a request; a stage's chunks have their own."""

CALLS_PER_SECOND = 500.0
"""Of one connection."""

_STAGES, _CHANGES, _WATCHERS, _OTHERS = 32, 8, 64, 64

LIMITS: Mapping[str, Limit] = {
    f"/{SERVICE}/Stage": Limit(_STAGES, CHUNK_MESSAGE_BYTES),
    f"/{SERVICE}/Commit": Limit(_CHANGES),
    f"/{SERVICE}/RollBack": Limit(_CHANGES),
    f"/{SERVICE}/SetSpeculation": Limit(_CHANGES),
    f"/{SERVICE}/WatchAcceptance": Limit(_WATCHERS),
}


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The next interceptor after access: who may not call waits for nothing and takes no place.

    Args:
        refused: is told of every call that ended with an error.
        limits: by method, ``/package.Service/Method``.
        seconds: longest wait for a request.
    """

    def __init__(
        self,
        refused: RefusedCalls,
        limits: Mapping[str, Limit] = LIMITS,
        seconds: float | None = None,
    ) -> None:
        self._refused = refused
        self._limits = limits
        self._seconds = seconds or MESSAGE_SECONDS
        self._places = Places()
        self._rate = CallRate(CALLS_PER_SECOND)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """gRPC's: the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        limit = self._limits.get(method, Limit(_OTHERS))
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

        async def argument(requests: AsyncIterator[Any], context: Any) -> Any:
            self._rate.spend(context.peer())
            try:
                first = await asyncio.wait_for(anext(requests, None), self._seconds)
            except TimeoutError as error:
                raise silent(self._seconds) from error
            if handler.request_streaming:
                return _readable(first, requests)
            if first is None:
                raise RefusedError(
                    "request", "none", "one", "send the request before ending the call"
                )
            if isinstance(first, Unreadable):
                raise first.refusal
            return first

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            with self._noted(method, context):
                try:
                    given = await argument(requests, context)
                    with self._places.taken(method, limit.calls):
                        return await behavior(given, context)
                except NotImplementedError:
                    await _abort(context, not_implemented(method))
                except RefusedError as error:
                    await _abort(context, error)

        async def answers(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            with self._noted(method, context):
                try:
                    given = await argument(requests, context)
                    with self._places.taken(method, limit.calls):
                        async for each in behavior(given, context):
                            yield each
                except RefusedError as error:
                    await _abort(context, error)

        read = reader(handler.request_deserializer or bytes, method, limit.message_bytes)
        if handler.response_streaming:
            # Some write their answers themselves instead.
            yields = inspect.isasyncgenfunction(behavior)
            return grpc.stream_stream_rpc_method_handler(
                answers if yields else answer, read, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(answer, read, handler.response_serializer)

    @contextmanager
    def _noted(self, method: str, context: Any) -> Any:
        try:
            yield
        finally:
            code = _code_of(context)
            if code is not None:
                self._refused.note(method, code, context.details() or "")


async def _readable(first: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    item = first
    while item is not None:
        if isinstance(item, Unreadable):
            raise item.refusal
        yield item
        item = await anext(requests, None)


def _code_of(context: Any) -> grpc.StatusCode | None:
    """The error that the call ended with; None where it did not."""
    code = context.code()
    if not isinstance(code, grpc.StatusCode):
        # gRPC's own number.
        code = next((each for each in grpc.StatusCode if each.value[0] == code), None)
    return None if code is grpc.StatusCode.OK else code


READY_SERVICE = "slipstream.v1.RolloutServer/ready"
"""Health of this name says whether requests should be sent here (``readiness``)."""


MAX_CALLS = 4096
"""Calls in progress at a time, those included that sent nothing yet."""

_POLL_SECONDS = 0.05
_HEALTH_SECONDS = 0.5
_GRACE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class ControlServer:
    """Starts, watches over and stops the gRPC server.

    Health is SERVING from the moment the OpenAI API answers until the engine dies,
    is not to be trusted, or the server stops. Of ``READY_SERVICE`` only while, beside
    that, nothing speaks against sending requests here.

    Args:
        service: the servicer.
        control: watched for an engine that cannot be trusted.
        engine: watched for death.
        guard: watches acceptance.
        http_started: whether the OpenAI API accepts requests.
        announce: called once when everything is ready.
        access: who may call.
    """

    def __init__(
        self,
        service: pb_grpc.RolloutServerServicer,
        control: RolloutControl,
        engine: Engine,
        guard: AcceptanceGuard,
        http_started: Callable[[], bool],
        announce: Callable[[], None],
        access: Access,
    ) -> None:
        self._control = control
        self._engine = engine
        self._guard = guard
        self._http_started = http_started
        self._announce = announce
        self._health = health.aio.HealthServicer()
        self._access = access
        self.refused_calls = RefusedCalls()
        guards = [] if access.anonymous else [AioAccessInterceptor(access)]
        self._server = grpc.aio.server(
            interceptors=(*guards, Admission(self.refused_calls)),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        pb_grpc.add_RolloutServerServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._watch: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises RefusedError: the port was taken meanwhile."""
        await self._set_health(serving=False)
        try:
            at, tls = f"{host}:{port}", self._access.tls
            self.port = (
                self._server.add_insecure_port(at)
                if tls is None
                else self._server.add_secure_port(at, tls.grpc_credentials())
            )
        except RuntimeError as error:
            raise RefusedError(
                "--control-port", f"{host}:{port} in use", "a free port", "choose another port"
            ) from error
        await self._server.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_over())

    async def stop(self) -> None:
        """Stop listening; ends calls that are under way after a moment."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        await self._set_health(serving=False)
        await self._control.close()
        await self._server.stop(_GRACE_SECONDS)

    async def _watch_over(self) -> None:
        while not self._http_started():
            await asyncio.sleep(_POLL_SECONDS)
        await self._set_health(serving=True)
        self._announce()
        while self._engine.is_alive() and not self._control.untrusted.is_set():
            self._look_at_acceptance()
            await self._set_ready(not self._control.readiness.reason)
            await asyncio.sleep(_HEALTH_SECONDS)
        await self._set_health(serving=False)
        if self._control.untrusted.is_set():
            logger.critical("the weights in memory are unknown; stopping rather than serving them")
            os.kill(os.getpid(), signal.SIGTERM)

    def _look_at_acceptance(self) -> None:
        control, before = self._control, self._control.readiness.reason
        found = self._guard.check(control.live[DRAFT].version or 0, control.commits[DRAFT])
        control.readiness.report(ACCEPTANCE, found)
        if control.readiness.reason != before:
            logger.warning("not ready: %s", control.readiness.reason or "no longer so")

    async def _set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(READY_SERVICE, status.SERVING if ready else status.NOT_SERVING)

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if serving else status.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, value)
        await self._set_ready(serving and not self._control.readiness.reason)
