"""Whatever a request carries ends no engine that others use, and drafts change none of its tokens.

Each parameter alone and each pair, while drafting is switched and drafts are swapped, beside greedy
requests without any. Greedy requests with state in the sampler are compared with those of an engine
that never drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import IN_FLIGHT, Live, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.contract("lossless")]

Body = dict[str, Any]
DIGITS = "[0-9]{3,9}"
SERVED: dict[str, Body] = {
    "seed": {"seed": 3},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "greedy": {"temperature": 0.0},
    "n": {"n": 2},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "echo": {"echo": True, "logprobs": 1},
    "allowed_token_ids": {"allowed_token_ids": [2, *range(4, 60)]},
    "bad_words": {"bad_words": ["7", "1 2"]},
    "min_tokens": {"min_tokens": 5},
    "stop": {"stop": ["7", "so"]},
    "stop_token_ids": {"stop_token_ids": [7, 8, 17]},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.3,
    },
    "regex": {"structured_outputs": {"regex": DIGITS}},
    "json": {"structured_outputs": {"json": {"type": "integer", "minimum": 1, "maximum": 9}}},
    "priority": {"priority": 0},
}
REFUSED: dict[str, Body] = {
    "min_p": {"min_p": 0.1},
    "logit_bias": {"logit_bias": {"5": 2.0}},
    "logprob_token_ids": {"logprob_token_ids": [5, 7], "logprobs": 1},
}
REFUSED_BY_V2: dict[str, Body] = {
    "allowed_token_ids": {"allowed_token_ids": [4 + number % 100 for number in range(1025)]},
    "bad_words": {"bad_words": ["1 " * 600, "2 " * 600]},
}
UNWRITABLE: Body = {"structured_outputs": {"json": {"type": "object"}}}
"""The tiny policy's vocabulary has no brace: no token is allowed, and the request fails alone."""

NEIGHBOURS = prompts(4)

STATEFUL: dict[str, Body] = {
    "stop_token_ids": {"stop_token_ids": [5, 6, 7, 17]},
    **{
        f"min_tokens {least}": {"stop_token_ids": [5, 6, 7, 17], "min_tokens": least}
        for least in range(3, 19, 2)
    },
    "stop": {"stop": ["7", "so"]},
    "penalties": SERVED["penalties"],
    "presence_penalty": {"presence_penalty": 1.5},
    "bad_words": SERVED["bad_words"],
    "regex": {"structured_outputs": {"regex": DIGITS}, "min_tokens": 5},
    "all": {
        **{"min_tokens": 6, "stop_token_ids": [8, 9], "bad_words": ["7"]},
        **{"presence_penalty": 1.0, "logprobs": 2},
    },
}


@pytest.fixture(
    scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.slow)], ids=["V1", "V2"]
)
def engine(request: pytest.FixtureRequest, serve) -> Live:  # type: ignore[no-untyped-def]
    """A server whose prefills take several steps; it serves 16 requests at once (V2: 3)."""
    options = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64")
    live: Live = serve(*options, runner=request.param)
    return live


@pytest.fixture(scope="module")
def drafts(draft_dir: Path) -> list[dict[str, torch.Tensor]]:
    """Two that differ."""
    good = load(draft_dir)
    return [perturbed(good, scale=0.05, seed=9), good]


def send(live: Live, bodies: Sequence[Body]) -> list[httpx.Response]:
    """Send the requests, many at a time; returns when all are answered."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(lambda body: _post(live, body), bodies))


def _post(live: Live, body: Body) -> httpx.Response:
    plain = {"model": "policy", "return_token_ids": True, "temperature": 1.0, "max_tokens": 8}
    return live.client.post("/v1/completions", json={**plain, **body})


def send_under_changes(
    live: Live, bodies: Sequence[Body], drafts: Sequence[dict[str, torch.Tensor]]
) -> list[httpx.Response]:
    """``send`` while drafting is switched off and on and drafts are swapped."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(send, live, bodies)
        for change in itertools.count():
            live.speculate(bool(change % 2))
            if change % 8 == 0:
                live.swap(change, drafts[change // 8 % 2])
            if answers.done():
                break
        live.speculate(True)
        return answers.result()


def test_no_request_ends_an_engine(live_plain: list[Any], engine: Live, drafts: Any) -> None:
    long = [*range(4, 14)] * 4
    alone = [*SERVED.items(), *REFUSED.items(), ("unwritable", UNWRITABLE)]
    if engine.runner == "V2":
        alone += [(f"long {name}", body) for name, body in REFUSED_BY_V2.items()]
        pairs = list(itertools.pairwise(SERVED.values()))  # it is interpreted
    else:
        pairs = list(itertools.combinations([body for _, body in alone], 2))
    bodies = [{"prompt": long, **body} for _, body in alone]
    bodies += [{"prompt": long, **one, **other} for one, other in pairs]
    with engine.generating(NEIGHBOURS) as rounds:
        answers = send_under_changes(engine, bodies, drafts)
    for (name, body), answer in zip(alone, answers, strict=False):
        if body is UNWRITABLE:
            assert answer.status_code == 500
        elif name in SERVED:
            assert answer.status_code == 200, (name, answer.text)
        else:
            assert answer.status_code == 400, (name, answer.text)
            assert name.removeprefix("long ") in answer.text
    assert {answer.status_code for answer in answers} == {200, 400, 500}
    assert rounds and all(done == live_plain for done in rounds), "no other request is altered"
    assert engine.generate(NEIGHBOURS) == live_plain


@pytest.fixture(scope="module")
def live_plain(engine: Live) -> list[Any]:
    """The server's own greedy completions without drafts."""
    engine.speculate(False)
    completions = engine.generate(NEIGHBOURS)
    engine.speculate(True)
    return completions


def test_drafts_do_not_alter_stateful_requests(engine: Live, drafts: Any) -> None:
    count = 16 if engine.runner == "V1" else 1  # V2 is interpreted
    problems = [prompt_ids(problem) for problem in held_out_problems(count)]
    bodies = [
        {"prompt": prompt, "temperature": 0.0, "max_tokens": 24, **state}
        for state in STATEFUL.values()
        for prompt in problems
    ]

    def choices(answers: list[httpx.Response]) -> list[Any]:
        return [answer.raise_for_status().json()["choices"][0] for answer in answers]

    def tokens(found: list[Any]) -> list[Any]:
        return [(one["token_ids"], one["finish_reason"], one["text"]) for one in found]

    engine.speculate(False)
    expected = choices(send(engine, bodies))
    engine.speculate(True)
    before = sum(engine.drafts().values())
    assert tokens(choices(send(engine, bodies))) == tokens(expected)
    assert sum(engine.drafts().values()) > before
    assert tokens(choices(send_under_changes(engine, bodies, drafts))) == tokens(expected)
    stopped = {one["finish_reason"] for one in expected}
    assert stopped == {"stop", "length"}


def test_seed_gives_equal_tokens_however_prefill_is_split(engine: Live) -> None:
    """Requests alone are prefilled in one step each; together, some take two."""
    engine.speculate(False)
    bodies = [{"prompt": [1, *range(4 + row, 44 + row)], "seed": 5} for row in range(12)]
    alone = [_post(engine, body).json()["choices"][0]["token_ids"] for body in bodies]
    together = [answer.json()["choices"][0]["token_ids"] for answer in send(engine, bodies)]
    engine.speculate(True)
    assert together == alone
    assert len(set(map(tuple, alone))) > 1
