"""Other rollout servers as sources of a draft: fetches tensors by hash, and serves its own.

A source is trusted with nothing: every tensor is verified as if a client had sent it. One whose
bytes have another hash is not asked again for that stage, and named in the stage's result.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc

from rollout_server.control import RolloutControl
from rollout_server.upload import BYTES_PER_SECOND, Upload
from slipstream.client import channel_options, split_address
from slipstream.errors import RefusedError, StatusCode, clean, failure_text
from slipstream.security import NONE, ClientCredentials
from slipstream.serving import Workers
from slipstream.tensors import CHUNK_BYTES
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

MAX_SOURCES = 4
"""Of one stage."""

MAX_SERVED = 8
"""Tensors that this server sends to others at a time."""

ANSWER_SECONDS = 5.0
"""Longest wait for a source's next bytes."""

SLOW_SECONDS = 20.0
"""That a source may be behind ``BYTES_PER_SECOND`` in all. One that sends a byte at a time would
take the time of the others."""

AT_ONCE = 2
"""Tensors that are fetched at a time: one arrives while the other is verified."""

FAILURES = ("altered", "failed")
"""Why a source was given up: its bytes had another hash, or it did not answer or lacked them."""

Metadata = tuple[tuple[str, str], ...]

_MAX_ADDRESS_CHARACTERS = 256


class Peers:
    """Fetches from other servers, and counts.

    Attributes:
        credentials: shown to other servers' control planes.
        fetched_bytes: that arrived from them.
        served_bytes: that went to them.
        failures: sources that were given up, by ``FAILURES``.
    """

    def __init__(self, credentials: ClientCredentials = NONE) -> None:
        self.credentials = credentials
        self.fetched_bytes = 0
        self.served_bytes = 0
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))

    async def fetch(self, upload: Upload, sources: Sequence[str]) -> Mapping[str, list[str]]:
        """Fetch what ``upload`` misses from the first source that has it; the rest stays missing.

        Args:
            upload: of a stage.
            sources: control planes.

        Returns:
            The sources that were given up, by ``FAILURES``.

        Raises:
            RefusedError: this server's own store is full, or a tensor is not finite.
        """
        given_up: dict[str, list[str]] = {why: [] for why in FAILURES}
        for address in sources:
            if not upload.missing:
                break
            before = upload.bytes_fetched
            try:
                why, text = await self._fetch_from(address, upload)
            except (grpc.RpcError, TimeoutError) as error:
                why = "failed"
                slow = "too little in time"
                text = failure_text(error) if isinstance(error, grpc.RpcError) else slow
            finally:
                self.fetched_bytes += upload.bytes_fetched - before
            if why:
                given_up[why].append(address)
                self.failures[why] += 1
                logger.warning("source %s dropped (%s): %s", clean(address), why, clean(text))
        for name in upload.missing:
            upload.forget(name)
        return given_up

    async def serve(
        self, control: RolloutControl, request: pb.FetchRequest, workers: Workers
    ) -> AsyncIterator[pb.FetchResponse]:
        """The bytes of one tensor of a draft. Raises RefusedError (NOT_FOUND): it is not held."""
        key, store = control.draft_content(request.sha256), control.store
        if request.offset > key.size:
            raise RefusedError("offset", request.offset, f"at most {key.size}", "begin at 0")
        # It may be superseded while a slow reader takes it.
        store.retain([key])
        try:
            with store.path(key).open("rb") as file:
                for offset in range(request.offset, key.size, CHUNK_BYTES):
                    data = await workers.run(os.pread, file.fileno(), CHUNK_BYTES, offset)
                    self.served_bytes += len(data)
                    yield pb.FetchResponse(data=data)
        except OSError as error:
            expected, code = "a file that can be read", StatusCode.NOT_FOUND
            raise RefusedError(
                "sha256", error.strerror, expected, "ask another server", code
            ) from error
        finally:
            store.release([key])

    async def _fetch_from(self, address: str, upload: Upload) -> tuple[str, str]:
        """Fetch everything from one source; why and with what text it is given up, or empty."""
        try:
            channel, metadata = self._connect(address)
        except RefusedError as error:
            return "failed", str(error)
        async with channel:
            source = _Source(pb_grpc.RolloutServerStub(channel), metadata, upload)
            names = iter(list(upload.missing))

            async def some() -> str:
                for name in names:
                    if not await source.fetch(name):
                        return name
                return ""

            fetching = [asyncio.ensure_future(some()) for _ in range(AT_ONCE)]
            try:
                altered = "".join([name for name in await asyncio.gather(*fetching) if name][:1])
            finally:
                for task in fetching:
                    task.cancel()
                await asyncio.wait(fetching)
        return ("altered", f"{altered} has another hash") if altered else ("", "")

    def _connect(self, address: str) -> tuple[grpc.aio.Channel, Metadata]:
        """Raises RefusedError: no address, or one that these credentials are not for."""
        try:
            split_address(clean(address, _MAX_ADDRESS_CHARACTERS))
        except ValueError as error:
            raise RefusedError("sources", error, "host:port", "name control planes") from None
        credentials = self.credentials
        credentials.check_address(address, "sources")
        options = channel_options(address, credentials)
        token, tls = credentials.token(), credentials.tls()
        metadata = () if token is None else (("authorization", f"Bearer {token.now()}"),)
        if tls is None:
            return grpc.aio.insecure_channel(address, options), metadata
        return grpc.aio.secure_channel(address, tls, options), metadata


class _Source:
    """One source of an upload."""

    def __init__(self, stub: pb_grpc.RolloutServerStub, metadata: Metadata, upload: Upload) -> None:
        self._stub, self._metadata, self._upload = stub, metadata, upload
        self._began, self._before = time.monotonic(), upload.bytes_fetched

    async def fetch(self, name: str) -> bool:
        """Fetch one tensor; whether the source's bytes have its hash.

        Raises:
            TimeoutError: it sent nothing for ``ANSWER_SECONDS``, or too little until now.
        """
        upload = self._upload
        begun = upload.begun(name)
        try:
            await self._read(name)
        except RefusedError as error:
            upload.forget(name)
            if error.field not in (name, f"{name}.data", f"{name}.sha256"):
                # Not the source's: the store is full, or the release itself is bad.
                raise
            # A beginning that another source sent may be at fault.
            return begun > 0 and await self.fetch(name)
        return True

    async def _read(self, name: str) -> None:
        upload = self._upload
        request = pb.FetchRequest(sha256=upload.missing[name].sha256, offset=upload.begun(name))
        call = self._stub.Fetch(request, metadata=self._metadata)
        answers = aiter(call)
        try:
            while name in upload.missing:
                response = await asyncio.wait_for(anext(answers, None), self._left())
                if response is None:
                    await upload.finish([name])
                    return
                await upload.fetched(name, response.data)
        finally:
            call.cancel()

    def _left(self) -> float:
        """Seconds for its next bytes."""
        due = (self._upload.bytes_fetched - self._before) / BYTES_PER_SECOND
        left = SLOW_SECONDS + due - (time.monotonic() - self._began)
        return max(0.0, min(ANSWER_SECONDS, left))
