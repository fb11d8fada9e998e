"""Rollouts from the OpenAI API of rollout servers, as token ids with their log-probabilities."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import Any, Protocol

import httpx

from slipstream.errors import RefusedError, clean

_IDLE_SECONDS = 2.0
# Below it vLLM samples greedily, and then refuses to make several completions of a prompt.
_GREEDY = 1e-5
_VERSIONS = "x-slipstream-policy-versions"


@dataclass(frozen=True)
class Completion:
    """One completion of one prompt.

    Attributes:
        token_ids: the closing end-of-sequence token included where it was reached.
        logprobs: log-probability of each token as the server reports it; None where
            it had none. Raw ones (temperature 1) unless the server was started with
            ``--logprobs-mode processed_logprobs``.
        spans: first token and policy version of each stretch of tokens that one version sampled,
            in order; a version is None until one was pushed. Empty where the server does not say.
        acceptance_length: mean number of tokens per verification step, by vLLM's count of this
            request; None where nothing was drafted or the server does not say. It does with
            ``--per-request-spec-decode-metrics summary`` (vLLM 0.32), for a request of one sample.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    spans: tuple[tuple[int, int | None], ...] = ()
    acceptance_length: float | None = None

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled it; None where one of them is not known."""
        versions = [version for _, version in self.spans]
        known = [version for version in versions if version is not None]
        return min(known) if known and len(known) == len(versions) else None


class Rollouts(Protocol):
    """A source of completions; ``CompletionsClient`` is one."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> list[Completion]:
        """Generate one completion of each prompt (token ids)."""


class CompletionsClient(AbstractContextManager["CompletionsClient"]):
    """A client of ``/v1/completions`` of one or several rollout servers, which take turns.

    Args:
        urls: ``http://host:port`` of each server.
        model: its ``--served-model-name``.
        seconds: longest wait for a connection, and for the answer to a request.
        in_flight: most requests at a time.

    Raises:
        RefusedError: no server, or an address without http://.
    """

    def __init__(
        self, urls: Sequence[str], model: str, *, seconds: float = 600.0, in_flight: int = 64
    ) -> None:
        if not urls:
            raise RefusedError("urls", "none", "at least one http://host:port", "name a server")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise RefusedError("urls", url, "http://host:port", f"write http://{url}")
        self._model = model
        # vLLM's server closes a connection that was idle for 5 s, which is httpx's own limit too:
        # used in that very moment a request was lost.
        limits = httpx.Limits(
            max_connections=in_flight,
            max_keepalive_connections=in_flight,
            keepalive_expiry=_IDLE_SECONDS,
        )
        # With a transport of its own a client uses no proxy. Those that the environment names do
        # not reach a cluster's servers, and httpx does not read networks (10.0.0.0/8) in no_proxy.
        self._clients = [
            httpx.Client(base_url=u, timeout=seconds, transport=httpx.HTTPTransport(limits=limits))
            for u in urls
        ]
        self._in_flight = in_flight

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        for client in self._clients:
            client.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> list[Completion]:
        """Generate one completion of each prompt, all at once.

        Equal neighbours go as one request, greedy ones (``temperature`` 0) as one each. Of a
        request for several samples vLLM gives no ``acceptance_length``: keep equal prompts apart
        where it is wanted.

        Args:
            prompts: token ids; a prompt is repeated for each completion wanted.
            sampling: fields of the request, for example ``max_tokens`` and ``temperature``.

        Raises:
            httpx.HTTPError: a server did not answer, or answered with another error than 400.
            RefusedError: a server refuses the request, or its answer has no token ids or
                log-probabilities.
        """
        groups = [(key, len(list(same))) for key, same in groupby(map(tuple, prompts))]
        temperature = sampling.get("temperature")
        if temperature is not None and temperature < _GREEDY:
            groups = [(tuple(prompt), 1) for prompt in prompts]
        failures: list[httpx.HTTPError | RefusedError] = []

        def complete(client: httpx.Client, prompt: Sequence[int], samples: int) -> list[Completion]:
            # After an error, requests that wait are not sent: each would take its whole deadline.
            if failures:
                raise failures[0]
            try:
                return self._complete(client, prompt, samples, sampling)
            except (httpx.HTTPError, RefusedError) as error:
                failures.append(error)
                raise

        with ThreadPoolExecutor(self._in_flight, "slipstream-rollouts") as pool:
            jobs = [
                pool.submit(complete, client, prompt, samples)
                for client, (prompt, samples) in zip(cycle(self._clients), groups, strict=False)
            ]
            try:
                return [completion for job in jobs for completion in job.result()]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _complete(
        self,
        client: httpx.Client,
        prompt: Sequence[int],
        samples: int,
        sampling: Mapping[str, Any],
    ) -> list[Completion]:
        body = {
            **sampling,
            "model": self._model,
            "prompt": list(prompt),
            "n": samples,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = client.post("/v1/completions", json=body, headers={_VERSIONS: "1"})
        if answer.status_code == httpx.codes.BAD_REQUEST:
            raise _refusal(answer, sampling)
        answer.raise_for_status()
        document = answer.json()
        found, length = document["choices"], _acceptance_length(document)
        choices = [
            _completion(choice, spans, length)
            for choice, spans in zip(found, _spans(answer.headers, len(found)), strict=True)
        ]
        if len(choices) != samples:
            raise RefusedError("choices", len(choices), samples, "see the server's log")
        return choices


def _refusal(answer: httpx.Response, sampling: Mapping[str, Any]) -> RefusedError:
    """The refusal of a server, in its own words, with the sampling parameters that these name."""
    try:
        words = str(answer.json()["error"]["message"])
    except (ValueError, TypeError, KeyError):
        words = answer.text
    given = [name for name, value in sampling.items() if value]
    named = [name for name in given if re.search(rf"\b{re.escape(name)}\b", words)]
    next_step = f"leave {' and '.join(named)} out" if named else "change what the server names"
    if "speculative" in words:
        next_step += ", or generate with a server without drafts (--draft-kind none)"
    field, found = f"sampling: {', '.join(named or given)}", f"HTTP 400 ({clean(words)})"
    return RefusedError(field, found, "parameters that the server takes", next_step)


def _spans(headers: httpx.Headers, samples: int) -> list[tuple[tuple[int, int | None], ...]]:
    """The spans of each sample of the prompt. Raises RefusedError: a header of another server."""
    text = headers.get(_VERSIONS)
    if text is None:
        return [()] * samples
    try:
        told = json.loads(text)
        alone, spans = [(0, told["version"])], told["spans"]
        return [
            tuple((int(at), None if version is None else int(version)) for at, version in found)
            for found in (spans.get(f"0/{number}", alone) for number in range(samples))
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        expected, step = "the policy versions of each sample", "ask for fewer samples in a request"
        raise RefusedError(_VERSIONS, clean(text, 64), expected, step) from error


def _acceptance_length(document: Mapping[str, Any]) -> float | None:
    """vLLM's count for the one sample of an answer; None where it is not there or of no step.

    Raises RefusedError: it has another shape; vLLM calls it experimental.
    """
    told = None
    try:
        told = (document.get("metrics") or {}).get("speculative_decoding")
        return float(told["mean_acceptance_length"]) if told and told["num_spec_steps"] else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        expected = "num_spec_steps and mean_acceptance_length, as vLLM 0.32 has them"
        step = "start the server without --per-request-spec-decode-metrics"
        field = "metrics.speculative_decoding"
        raise RefusedError(field, clean(str(told), 64), expected, step) from error


def _completion(
    choice: Mapping[str, Any], spans: tuple[tuple[int, int | None], ...], length: float | None
) -> Completion:
    """One choice of the answer, checked: a missing log-probability must not shift the rest."""
    tokens = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not tokens or logprobs is None or len(tokens) != len(logprobs):
        raise RefusedError(
            "choices",
            f"{len(tokens or ())} token ids, {len(logprobs or ())} log-probabilities",
            "one log-probability for each of at least one token id",
            "serve with rollout-server; vLLM before 0.11 does not return token ids",
        )
    return Completion(list(tokens), list(logprobs), spans, length)
