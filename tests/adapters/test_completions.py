"""The completions client against a small HTTP server: order, grouping, and refused answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from policy_bridge.adapters.completions import Completion, CompletionsClient
from slipstream.errors import RefusedError
from tests.completions_server import Completions, choice, serving

Requests = list[dict[str, Any]]


class Answers(Completions):
    """Answers each prompt with itself backwards; the first token says what is wrong with it."""

    received: Requests

    def answer(self, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        self.received.append(body)
        tokens = body["prompt"][::-1]
        logprobs: list[float] | None = [-float(token) for token in tokens]
        if body["prompt"][0] == 90:
            logprobs = None
        if body["prompt"][0] == 91:
            tokens = tokens[:-1]
        count = body["n"] - (body["prompt"][0] == 92)
        status = 500 if body["prompt"][0] == 93 else 200
        return status, [choice(tokens, logprobs)] * count


@pytest.fixture
def served() -> Iterator[tuple[str, Requests]]:
    received: Requests = []
    with serving(type("Handler", (Answers,), {"received": received})) as port:
        yield f"http://127.0.0.1:{port}", received


def test_completions_keep_prompt_order_and_share_equal_requests(
    served: tuple[str, Requests],
) -> None:
    url, received = served
    prompts = [[1, 2], [1, 2], [1, 2], [3, 4, 5], [1, 2]]
    with CompletionsClient([url, url], "policy") as client:
        found = client.generate(prompts, {"temperature": 0.5, "max_tokens": 7})
    assert [c.token_ids for c in found] == [p[::-1] for p in prompts]
    assert found[3].logprobs == [-5.0, -4.0, -3.0]
    asked = sorted((tuple(r["prompt"]), r["n"]) for r in received)
    assert asked == [((1, 2), 1), ((1, 2), 3), ((3, 4, 5), 1)]
    assert {(r["temperature"], r["max_tokens"], r["model"]) for r in received} == {
        (0.5, 7, "policy")
    }


@pytest.mark.parametrize(("temperature", "most"), [(0.0, 1), (1e-6, 1), (1e-5, 3), (None, 3)])
def test_completions_greedy_sends_one_request_per_prompt(
    served: tuple[str, Requests], temperature: float | None, most: int
) -> None:
    """vLLM refuses several of a prompt: "n must be 1 when using greedy sampling"."""
    with CompletionsClient([served[0]], "policy") as client:
        found = client.generate([[1, 2]] * 3, {"temperature": temperature})
    assert [c.token_ids for c in found] == [[2, 1]] * 3
    assert {request["n"] for request in served[1]} == {most}


@pytest.mark.parametrize("first", [90, 91, 92])
def test_completions_incomplete_answer_refused(served: tuple[str, Requests], first: int) -> None:
    with CompletionsClient([served[0]], "policy") as client:
        with pytest.raises(RefusedError) as caught:
            client.generate([[1, 2], [first, 2], [first, 2]], {})
        assert caught.value.field == "choices"


def test_completions_http_500_or_no_server_raises(served: tuple[str, Requests]) -> None:
    with CompletionsClient([served[0]], "policy") as client, pytest.raises(httpx.HTTPStatusError):
        client.generate([[93, 2]], {})
    with pytest.raises(RefusedError):
        CompletionsClient([], "policy")


NOT_WITH_DRAFTS = (
    "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
)


def refused(refusal: bytes, sampling: dict[str, Any]) -> str:
    """Return what the client says where the server answers 400 with this."""
    handler = type("Handler", (Answers,), {"received": [], "refusal": refusal})
    with (
        serving(handler) as port,
        CompletionsClient([f"http://127.0.0.1:{port}"], "policy") as client,
        pytest.raises(RefusedError) as caught,
    ):
        client.generate([[1, 2]], sampling)
    return str(caught.value)


def test_completions_http_400_names_sampling_parameter() -> None:
    error = {"error": {"message": NOT_WITH_DRAFTS, "type": "BadRequestError", "code": 400}}
    said = refused(json.dumps(error).encode(), {"top_p": 0.9, "min_p": 0.02, "logit_bias": None})
    assert said.startswith(f"sampling: min_p: found HTTP 400 ({NOT_WITH_DRAFTS}), expected ")
    assert said.endswith(
        "leave min_p out, or generate with a server without drafts (--draft-kind none)"
    )


@pytest.mark.parametrize("body", [b"\x1b[2Jno" + b"!" * 9999, b'["no!"]', b'{"error": "no!"}'])
def test_completions_http_400_other_body_is_bounded_text(body: bytes) -> None:
    said = refused(body, {"top_p": 0.9})
    assert "no!" in said and said.isprintable() and len(said) < 800
    assert said.startswith("sampling: top_p: ")


def test_completions_stop_after_first_failed_request(served: tuple[str, Requests]) -> None:
    url, received = served
    prompts = [[93, 2], *([number, 2] for number in range(1, 41))]
    with (
        CompletionsClient([url], "policy", in_flight=1) as client,
        pytest.raises(httpx.HTTPStatusError),
    ):
        client.generate(prompts, {})
    assert len(received) == 1


@pytest.mark.parametrize("no_proxy", ["", "127.0.0.0/8", "fd00::/8"])
def test_completions_client_ignores_proxy_environment(
    no_proxy: str, served: tuple[str, Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", no_proxy)
    with CompletionsClient([served[0]], "policy") as client:
        assert len(client.generate([[1]], {"max_tokens": 3})) == 1


def test_completions_address_without_scheme_refused() -> None:
    with pytest.raises(RefusedError, match=r"write http://127\.0\.0\.1:8000"):
        CompletionsClient(["127.0.0.1:8000"], "policy")


def with_versions(value: str, samples: int) -> list[Completion]:
    """Completions of one prompt by a server that answers this header."""
    extra = {"x-slipstream-policy-versions": value}
    handler = type("Handler", (Answers,), {"received": [], "extra": extra})
    with (
        serving(handler) as port,
        CompletionsClient([f"http://127.0.0.1:{port}"], "policy") as client,
    ):
        return client.generate([[1, 2]] * samples, {})


def test_completion_spans_give_policy_version_per_token() -> None:
    told = '{"version":4,"spans":{"0/1":[[0,2],[1,4]],"0/2":[[0,null],[1,4]]}}'
    found = with_versions(told, 3)
    assert [c.spans for c in found] == [((0, 4),), ((0, 2), (1, 4)), ((0, None), (1, 4))]
    assert [c.oldest_version for c in found] == [4, 2, None]
    assert with_versions('{"version":null,"spans":{}}', 1)[0].oldest_version is None


def test_completion_without_version_header_has_no_spans(served: tuple[str, Requests]) -> None:
    with CompletionsClient([served[0]], "policy") as client:
        found = client.generate([[1, 2]], {})[0]
    assert found.spans == () and found.oldest_version is None


@pytest.mark.parametrize("told", ["too long", '{"version":1}', '{"version":1,"spans":{"0/0":[3]}}'])
def test_completion_malformed_version_header_refused(told: str) -> None:
    with pytest.raises(RefusedError, match="x-slipstream-policy-versions"):
        with_versions(told, 1)
