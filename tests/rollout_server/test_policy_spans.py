"""The policy version that sampled each token, and the header that says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from rollout_server.control.policy_spans import HEADER, MAX_CHARACTERS, PolicySpans, PolicyVersions

NAME = "0123456789abcdef" * 2
JSON = (b"content-type", b"application/json")


def told(spans: PolicySpans) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(spans.so_far(NAME))
    return found


def test_spans_begin_where_commit_found_sample() -> None:
    spans = PolicySpans()
    spans.commit(3, {})
    spans.begin(NAME)
    runs, waits, ended = (f"{n}_cmpl-{NAME}-0-00c0ffee" for n in range(3))
    spans.commit(4, {runs: 41, waits: 0, ended: -1, "cmpl-another-0-00c0ffee": 5})
    assert told(spans) == {
        "version": 4,
        "spans": {"0/0": [[0, 3], [41, 4]], "0/1": [[0, 4]], "0/2": [[0, 3]]},
    }
    # Nothing was sampled between two commits; one that ended stays as it was.
    spans.commit(5, {runs: 41, waits: 7})
    assert told(spans)["spans"] == {
        "0/0": [[0, 3], [41, 5]],
        "0/1": [[0, 4], [7, 5]],
        "0/2": [[0, 3]],
    }
    spans.end(NAME)
    spans.begin(NAME)
    assert told(spans) == {"version": 5, "spans": {}}, "it came after every commit"


def test_spans_name_sample_by_prompt_and_choice() -> None:
    spans = PolicySpans()
    spans.begin(NAME)
    assert told(spans) == {"version": None, "spans": {}}
    spans.commit(1, {f"cmpl-{NAME}-0-00c0ffee": 2, f"cmpl-{NAME}-1": 3})
    assert told(spans)["spans"] == {"0/0": [[0, None], [2, 1]], "1/0": [[0, None], [3, 1]]}


def test_spans_header_over_limit_says_too_long() -> None:
    spans = PolicySpans()
    spans.begin(NAME)
    spans.commit(1, {f"{n}_cmpl-{NAME}-0-00c0ffee": 2 for n in range(MAX_CHARACTERS // 10)})
    assert spans.so_far(NAME) == "too long"


def call(
    spans: PolicySpans,
    headers: Sequence[tuple[bytes, bytes]],
    during: Callable[[str], None],
    answered: Sequence[tuple[bytes, bytes]] = (JSON,),
    path: str = "/v1/completions",
) -> dict[bytes, bytes]:
    """Headers of the answer; ``during`` is told the name under which vLLM knows the request."""
    sent: list[dict[str, Any]] = []

    async def vllm(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        # The first, as vLLM takes it.
        names = (value for key, value in scope["headers"] if key == b"x-request-id")
        during(next(names, b"").decode())
        await send({"type": "http.response.start", "status": 200, "headers": list(answered)})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope = {"type": "http", "path": path, "headers": list(headers)}
    asyncio.run(PolicyVersions(vllm, spans)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return dict(sent[0]["headers"])


def test_spans_header_answers_any_request_id() -> None:
    spans = PolicySpans()
    spans.commit(1, {})

    def commits(name: str) -> None:
        assert len(name) == 32 and name != "mine"
        spans.commit(2, {f"cmpl-{name}-0-00c0ffee": 8})

    found = call(spans, [(HEADER.encode(), b"1"), (b"x-request-id", b"mine")], commits)
    assert json.loads(found[HEADER.encode()]) == {"version": 2, "spans": {"0/0": [[0, 1], [8, 2]]}}
    assert spans._open == {}


def test_spans_header_absent_unless_asked_or_streamed() -> None:
    spans = PolicySpans()
    mine = (b"x-request-id", b"mine")

    def as_given(name: str) -> None:
        assert name == "mine" and spans._open == {}

    assert HEADER.encode() not in call(spans, [mine], as_given)
    asked = [(HEADER.encode(), b"1"), mine]
    assert HEADER.encode() not in call(spans, asked, as_given, path="/v1/models")
    events = (b"content-type", b"text/event-stream; charset=utf-8")
    assert HEADER.encode() not in call(spans, asked, lambda name: None, [events])


def test_spans_forget_failed_request() -> None:
    spans = PolicySpans()

    def fails(name: str) -> None:
        assert list(spans._open) == [name]
        raise ConnectionError("the client left")

    with pytest.raises(ConnectionError):
        call(spans, [(HEADER.encode(), b"1")], fails)
    assert spans._open == {}
