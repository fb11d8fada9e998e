"""Rollouts of a file, or of a server that completes prompts, in an order that a restart repeats."""

from __future__ import annotations

import hashlib
import json
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from policy_bridge.adapters.completions import Completion, CompletionsClient
from slipstream.errors import RefusedError
from slipstream.sample import prompt_hash

AT_ONCE = 256
"""Completions that the server is asked for together; the next ones are asked for meanwhile."""

RETRY_SECONDS = (1.0, 5.0, 20.0)
"""Pauses before a server that did not answer is asked again."""

WAIT_SECONDS, ASK_SECONDS = 0.2, 30.0

PLAIN = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""Fields of a request that samples at its temperature alone: for what it leaves out, vLLM takes the
model's ``generation_config.json``."""


@dataclass(frozen=True)
class Rollout:
    """A prompt and its completion.

    Attributes:
        number: its place in the order, which is also its name.
        prompt: token ids.
        completion: token ids.
        logprobs: of the completion's tokens, as the server reports them; empty where none did.
    """

    number: int
    prompt: list[int]
    completion: list[int]
    logprobs: Sequence[float | None] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion)

    @property
    def group(self) -> str:
        """The ``Sample.group`` of its samples."""
        return _group(self.prompt or self.completion)


class Rollouts(ABC):
    """A source of rollouts.

    Attributes:
        option: that names it on the command line.
        temperature: they were sampled at.
        groups: the group of every prompt.
        facts: what tells it from another one, for a restart.
        completion_tokens: of all rollouts; None where that is not known.
    """

    option: str
    temperature: float
    groups: set[str]
    facts: Mapping[str, object]
    completion_tokens: int | None

    def check(self) -> None:
        """Raise RefusedError where they cannot come at present."""
        return

    @abstractmethod
    def read(self, first: int) -> Generator[Rollout | None]:
        """Rollouts from number ``first`` on; None for each moment in which none is there yet."""


class Reading(AbstractContextManager["Reading"]):
    """Rollouts from number ``first`` on, of which the next ones can be looked at before."""

    def __init__(self, rollouts: Rollouts, first: int) -> None:
        self._read = rollouts.read(first)
        self._ahead: deque[Rollout] = deque()

    def __exit__(self, *_: object) -> None:
        self._read.close()

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Rollout | None:
        return self._ahead.popleft() if self._ahead else next(self._read)

    def look(self, tokens: int) -> Sequence[Rollout]:
        """The next rollouts, of so many completion tokens; fewer where there are no more."""
        found = sum(len(one.completion) for one in self._ahead)
        while found < tokens:
            try:
                one = next(self._read)
            except StopIteration:
                break
            if one is not None:
                self._ahead.append(one)
                found += len(one.completion)
        return self._ahead


class RolloutFile(Rollouts):
    """Rollouts of a file: ``{"prompt": [ids], "completion": [ids]}`` a line, shuffled.

    A line may have the completion's ``"text"``, too: the ids must say that. All lines are checked
    at the start, after which only their places are in memory.

    Args:
        path: JSON lines.
        vocab_size: of the policy; every id is below it.
        tokenizer: the policy's.
        temperature: they were sampled at.
        seed: of the order.

    Raises:
        RefusedError: naming the line that is none, or the file that cannot be read.
    """

    option = "--rollouts"

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        temperature: float,
        seed: int,
    ) -> None:
        self._path = path
        self.temperature = temperature
        self.groups: set[str] = set()
        self.completion_tokens = 0
        places, total = [], hashlib.sha256()
        for line in _json_lines(path, self.option):
            for name in ("prompt", "completion"):
                check_ids(line.place, name, line.content.get(name), vocab_size)
            prompt, completion = line.content["prompt"], line.content["completion"]
            if "text" in line.content:
                check_text(line.place, completion, line.content["text"], tokenizer)
            self.groups.add(_group(prompt or completion))
            self.completion_tokens += len(completion)
            places.append(line.start)
            total.update(line.data)
        self.facts = {"rollouts": total.hexdigest(), "seed": seed}
        self._places = [places[index] for index in shuffled(len(places), f"{seed}")]

    def read(self, first: int) -> Generator[Rollout | None]:
        """See ``Rollouts``."""
        with self._path.open("rb") as file:
            for number in range(first, len(self._places)):
                file.seek(self._places[number])
                line = json.loads(file.readline())
                yield Rollout(number, line["prompt"], line["completion"])


@dataclass(frozen=True)
class Endpoint:
    """A server that answers ``/v1/completions`` with token ids, as vLLM does.

    Attributes:
        url: ``http://HOST:PORT``.
        model: its name of the policy.
        sampling: fields of the requests, ``temperature`` among them.
    """

    url: str
    model: str
    sampling: Mapping[str, Any]

    def check(self) -> None:
        """Raise RefusedError unless it says that it serves the model, or does not say."""
        try:
            # Without the environment's proxies, as the requests for completions.
            with httpx.Client(transport=httpx.HTTPTransport(), timeout=ASK_SECONDS) as client:
                answer = client.get(f"{self.url}/v1/models")
            served = [str(one["id"]) for one in answer.json()["data"]] if answer.is_success else []
        except httpx.HTTPError as error:
            raise self._refused(error) from error
        except (ValueError, KeyError, TypeError):
            served = []
        if served and self.model not in served:
            found = f"{self.model}, and {self.url} serves {', '.join(served)}"
            step = "serve --policy there, or give its name there with --model"
            raise RefusedError("--model", found, "a model that the endpoint serves", step)

    def complete(self, client: CompletionsClient, prompts: list[list[int]]) -> list[Completion]:
        """A completion of each prompt. Raises RefusedError: no answer, or one without token ids."""
        pauses = iter(RETRY_SECONDS)
        while True:
            try:
                return client.generate(prompts, self.sampling)
            except httpx.HTTPError as error:
                pause = next(pauses, None)
                if pause is None or (
                    isinstance(error, httpx.HTTPStatusError) and error.response.is_client_error
                ):
                    raise self._refused(error) from error
                time.sleep(pause)

    def _refused(self, error: httpx.HTTPError) -> RefusedError:
        expected = f"completions of the model {self.model}"
        step = "start the server, or correct --endpoint and --model; then give the command again"
        found = f"{self.url} ({str(error).partition(chr(10))[0]})"
        return RefusedError("--endpoint", found, expected, step)


class Prompts(Rollouts):
    """Completions of a file's prompts, ``samples`` of each, in a new order every round.

    Args:
        path: JSON lines: ``{"prompt": [ids]}``, ``{"prompt": "text"}``, or ``{"messages": [...]}``,
            which goes through the policy's chat template.
        tokenizer: the policy's.
        vocab_size: of the policy.
        endpoint: completes them.
        samples: completions of each prompt in a round.
        seed: of the order.
        endless: go round again; else one round.

    Raises:
        RefusedError: naming the line that is none of these, or the file that cannot be read.
    """

    option = "--prompts"
    completion_tokens = None

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        endpoint: Endpoint,
        *,
        samples: int,
        seed: int,
        endless: bool,
    ) -> None:
        self.temperature = float(endpoint.sampling["temperature"])
        self._vocab_size = vocab_size
        self._endpoint = endpoint
        self._samples = samples
        self._seed = seed
        self._endless = endless
        self._prompts = []
        total = hashlib.sha256()
        for line in _json_lines(path, self.option):
            self._prompts.append(_prompt(line, tokenizer, vocab_size))
            total.update(line.data)
        self.groups = {_group(prompt) for prompt in self._prompts}
        self.facts = {"prompts": total.hexdigest(), "samples": samples, "seed": seed}

    def check(self) -> None:
        """See ``Rollouts``."""
        self._endpoint.check()

    def read(self, first: int) -> Generator[Rollout | None]:
        """See ``Rollouts``. Raises RefusedError: the server does not answer any more."""
        pool = ThreadPoolExecutor(1, "rollouts")
        with CompletionsClient([self._endpoint.url], self._endpoint.model) as client:
            try:
                coming = pool.submit(self._part, client, first)
                while True:
                    # First, so that what was completed is trained on if the next part fails.
                    yield None
                    if not wait([coming], WAIT_SECONDS).done:
                        continue
                    part = coming.result()
                    if not part:
                        return
                    coming = pool.submit(self._part, client, part[-1].number + 1)
                    yield from part
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _part(self, client: CompletionsClient, first: int) -> list[Rollout]:
        size = len(self._prompts) * self._samples
        turn, begin = divmod(first, size)
        if turn and not self._endless:
            return []
        order = shuffled(len(self._prompts), f"{self._seed}:{turn}")
        places = range(begin, min(begin + AT_ONCE, size))
        prompts = [self._prompts[order[place // self._samples]] for place in places]
        answers = self._endpoint.complete(client, prompts)
        part = []
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), first):
            check_ids("--endpoint", "completion", answer.token_ids, self._vocab_size)
            part.append(Rollout(number, prompt, answer.token_ids, answer.logprobs))
        return part


def shuffled(count: int, seed: str) -> list[int]:
    """The numbers below ``count`` in an order that every version of Python gives for a seed: it
    promises to keep the numbers of ``random.Random``, but not what it shuffles to."""
    draw = random.Random(seed).random
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def check_ids(place: str, name: str, ids: object, vocab_size: int) -> None:
    """Raise RefusedError unless these are token ids of the policy."""
    whole = isinstance(ids, list) and all(type(one) is int for one in ids)
    outside = [one for one in ids if not 0 <= one < vocab_size] if whole else []  # type: ignore[attr-defined]
    if not whole or outside:
        found = f"{name} {ids!r:.60}" if not whole else f"{name} with {outside[:4]}"
        expected = f"a list of token ids below {vocab_size}, the policy's vocabulary"
        step = "give rollouts of this policy, as its own tokenizer's ids"
        raise RefusedError(place, found, expected, step)


def check_text(
    place: str, ids: Sequence[int], text: object, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise RefusedError unless the policy's tokenizer reads the text from the ids, its special
    tokens and what ends inside a character aside."""
    read = [str(tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (True, False)]
    if not isinstance(text, str) or _plain(text) not in map(_plain, read):
        found = f"{text!r:.60} beside ids that say {read[0]!r:.60}"
        step = "give ids of this policy's own tokenizer, or leave text out"
        raise RefusedError(f"{place}: text", found, "the text of the completion's ids", step)


def _plain(text: str) -> str:
    return text.rstrip("\ufffd").strip()


def _prompt(line: _Line, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """The token ids of a prompt's line."""
    content = line.content
    try:
        if "messages" in content:
            text = tokenizer.apply_chat_template(
                content["messages"], add_generation_prompt=True, tokenize=False
            )
            return tokenizer.encode(text, add_special_tokens=False)
        if isinstance(content["prompt"], str):
            return tokenizer.encode(content["prompt"])
    except (ValueError, TypeError, KeyError) as error:
        raise RefusedError(
            line.place,
            f"{type(error).__name__}: {error}",
            '{"prompt": "text"}, {"prompt": [token ids]} or {"messages": [...]}',
            "write one of these a line",
        ) from error
    check_ids(line.place, "prompt", content["prompt"], vocab_size)
    return list(content["prompt"])


def _group(tokens: Sequence[int]) -> str:
    return prompt_hash(torch.tensor(tokens, dtype=torch.int64)).hex()


@dataclass(frozen=True)
class _Line:
    """A line of a file: what names it, its first byte's place, its bytes and its object."""

    place: str
    start: int
    data: bytes
    content: dict[str, Any]


def _json_lines(path: Path, option: str) -> Iterator[_Line]:
    """Every line. Raises RefusedError: the file cannot be read or has none, or one is no object."""
    number = start = 0
    try:
        with path.open("rb") as file:
            # Not splitlines, which also splits at characters that a JSON string may have.
            for number, data in enumerate(file, 1):
                yield _line(f"{path} line {number}", start, data)
                start += len(data)
    except OSError as error:
        raise RefusedError(option, error, "a file of JSON lines in UTF-8", "name one") from error
    if not number:
        raise RefusedError(option, f"{path}: no line", "a file of JSON lines in UTF-8", "name one")


def _line(place: str, start: int, data: bytes) -> _Line:
    try:
        content = json.loads(data.decode())
    except ValueError as error:
        raise RefusedError(place, error, "JSON in UTF-8", "write an object a line") from error
    if not isinstance(content, dict):
        raise RefusedError(place, type(content).__name__, "an object", "write {...} a line")
    return _Line(place, start, data, content)
