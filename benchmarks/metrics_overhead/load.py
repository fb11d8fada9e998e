"""A load that stays the same: so many requests in flight, all of them as long as the server allows.

Requests that end when they are done end in bunches, and the prompts of those that follow make one
slice differ from the next by a tenth. Here a slice is decoding, and little else.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from types import TracebackType

import httpx

from benchmarks.hot_swap.servers import MODEL


class SteadyLoad:
    """Begins and ends with the ``with`` block. Owns one thread.

    Args:
        http: base address of the server.
        prompts: token ids.
        in_flight: requests at a time, half of them greedy and half at temperature 1.
        tokens: of each completion, whatever the model would end it with.
    """

    def __init__(
        self, http: str, prompts: Sequence[Sequence[int]], in_flight: int, tokens: int
    ) -> None:
        self._http = http
        self._prompts = prompts
        self._in_flight = in_flight
        self._tokens = tokens
        self._over = threading.Event()
        self._failed: list[httpx.HTTPError] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> SteadyLoad:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(120.0)

    def check(self) -> None:
        """Raises httpx.HTTPError: the first that a request met."""
        if self._failed:
            raise self._failed[0]

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=2 * self._in_flight)
        async with httpx.AsyncClient(base_url=self._http, timeout=120, limits=limits) as client:
            await asyncio.gather(*[self._slot(client, n) for n in range(self._in_flight)])

    async def _slot(self, client: httpx.AsyncClient, slot: int) -> None:
        # The first ones of different lengths: from then on they end one at a time.
        tokens = max(1, self._tokens * (slot + 1) // self._in_flight)
        for prompt in itertools.islice(itertools.cycle(self._prompts), slot * 7, None):
            if self._over.is_set():
                return
            body = {
                "model": MODEL,
                "prompt": list(prompt),
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": float(slot % 2),
            }
            try:
                (await client.post("/v1/completions", json=body)).raise_for_status()
            except httpx.HTTPError as error:
                self._failed.append(error)
                return
            tokens = self._tokens
