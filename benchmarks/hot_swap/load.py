"""The load: so many requests in flight on every server, in a process of its own.

Half of the requests are greedy, of prompts whose completions without speculation are
known; half draw from one prompt at temperature 1. A few of the greedy ones are streamed:
the time between two chunks of one request is an engine step as a user sees it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing as mp
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import httpx

MAX_TOKENS = 96
STREAMED = 4
"""The streamed ones among each server's requests in flight."""


@dataclass
class Seen:
    """The record of one server's requests.

    Args:
        greedy: greedy requests that were answered.
        different: of them, with other tokens than without speculation.
        failed: why requests failed.
        samples: first tokens of each completion at temperature 1.
        chunks: (monotonic seconds of a chunk, seconds since the one before it).
    """

    greedy: int = 0
    different: int = 0
    failed: list[str] = field(default_factory=list)
    samples: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[tuple[float, float]] = field(default_factory=list)

    def add(self, more: Seen) -> None:
        """Add what came after it."""
        self.greedy += more.greedy
        self.different += more.different
        self.failed += more.failed
        self.samples += more.samples
        self.chunks += more.chunks

    def take(self) -> Seen:
        """Return what is in it, and empty it."""
        taken = Seen(self.greedy, self.different, self.failed, self.samples, self.chunks)
        self.greedy = self.different = 0
        self.failed, self.samples, self.chunks = [], [], []
        return taken


@dataclass(frozen=True)
class Work:
    """The requests to make.

    Args:
        http: base address of each server.
        prompts: token ids; the first is the one drawn from.
        plain: greedy completion of each prompt without speculation.
        in_flight: requests per server.
        sampled_tokens: of each sample that are kept.
    """

    http: tuple[str, ...]
    prompts: Sequence[Sequence[int]]
    plain: Sequence[tuple[int, ...]]
    in_flight: int
    sampled_tokens: int


class Load:
    """The process. Begins at once; ``stop`` answers what was seen."""

    def __init__(self, work: Work) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(work, theirs), daemon=True)
        self._process.start()

    def take(self) -> list[Seen]:
        """Return what was seen since the last time, one entry per server. Raises RuntimeError."""
        return self._ask("take")

    def stop(self) -> list[Seen]:
        """Do as ``take`` once the requests in flight have ended; the process ends too."""
        try:
            return self._ask("stop")
        finally:
            self._process.join(5)
            self.kill()

    def kill(self) -> None:
        """End the process as it is."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def _ask(self, word: str, timeout: float = 120.0) -> list[Seen]:
        try:
            self._pipe.send(word)
            if not self._pipe.poll(timeout):
                raise RuntimeError(f"the load did not answer within {timeout:.0f} s")
            seen: list[Seen] = self._pipe.recv()
            return seen
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError("the load's process died") from error


def complete_all(
    http: str, prompts: Sequence[Sequence[int]], at_once: int
) -> list[tuple[int, ...]]:
    """Greedy completions, in order. Raises httpx.HTTPStatusError."""

    async def run() -> list[tuple[int, ...]]:
        async with _client(http) as client:
            gate = asyncio.Semaphore(at_once)

            async def one(prompt: Sequence[int]) -> tuple[int, ...]:
                async with gate:
                    return await _complete(client, prompt, 0.0)

            return await asyncio.gather(*map(one, prompts))

    return asyncio.run(run())


def _main(work: Work, pipe: Connection) -> None:
    # The benchmark decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_run(work, pipe))


async def _run(work: Work, pipe: Connection) -> None:
    over = asyncio.Event()
    seen = [Seen() for _ in work.http]

    def asked() -> None:
        try:
            if pipe.recv() == "take":
                pipe.send([one.take() for one in seen])
                return
        except EOFError:
            pass  # the benchmark is gone
        over.set()
        loop.remove_reader(pipe.fileno())

    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), asked)
    clients = [_client(http) for http in work.http]
    tasks = [
        asyncio.create_task(_slot(client, work, slot, one, over))
        for client, one in zip(clients, seen, strict=True)
        for slot in range(work.in_flight)
    ]
    await asyncio.gather(*tasks)
    for client in clients:
        await client.aclose()
    pipe.send([one.take() for one in seen])


async def _slot(
    client: httpx.AsyncClient, work: Work, slot: int, seen: Seen, over: asyncio.Event
) -> None:
    """One of the requests in flight: as soon as it is answered, the next."""
    turns = itertools.islice(itertools.cycle(range(len(work.prompts))), slot * 7, None)
    while not over.is_set():
        try:
            if slot % 2:
                tokens = await _complete(client, work.prompts[0], 1.0)
                seen.samples.append(tokens[: work.sampled_tokens])
                continue
            index = next(turns)
            if slot < 2 * STREAMED:
                tokens = await _stream(client, work.prompts[index], seen)
            else:
                tokens = await _complete(client, work.prompts[index], 0.0)
            seen.greedy += 1
            seen.different += tokens != work.plain[index]
        except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
            seen.failed.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)


def _client(http: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=512, max_keepalive_connections=512)
    return httpx.AsyncClient(base_url=http, timeout=120, limits=limits)


def _body(prompt: Sequence[int], temperature: float) -> dict[str, Any]:
    return {
        "model": "policy",
        "prompt": list(prompt),
        "max_tokens": MAX_TOKENS,
        "temperature": temperature,
        "return_token_ids": True,
    }


async def _complete(
    client: httpx.AsyncClient, prompt: Sequence[int], temperature: float
) -> tuple[int, ...]:
    answer = await client.post("/v1/completions", json=_body(prompt, temperature))
    answer.raise_for_status()
    return tuple(answer.json()["choices"][0]["token_ids"])


async def _stream(client: httpx.AsyncClient, prompt: Sequence[int], seen: Seen) -> tuple[int, ...]:
    body = {**_body(prompt, 0.0), "stream": True}
    tokens: list[int] = []
    last = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            new = json.loads(line[6:])["choices"][0].get("token_ids") or []
            now = time.monotonic()
            if new and last:
                seen.chunks.append((now, now - last))
            if new:
                last = now
            tokens.extend(new)
    return tuple(tokens)
