"""MTP heads, draft models and DFlash on real vLLM: the replay predicts, and swaps lose nothing.

The MTP head's policy is the example's, written as the Qwen3-Next model that it is; the draft model
is the first layers of the example's policy; "pard" is one that drafts in parallel. Tolerance and
rollouts are those of ``test_replay``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.drafters import DRAFTERS
from examples.arithmetic_grpo.make_mtp import first_layers, policy_with_mtp
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.local_services import ARITHMETIC
from tests.alignment.test_replay import ROLLOUTS, assert_replay
from tests.losslessness.joint import Z_BOUND, surprise
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, RefusedError, prompts, swap_many

SWAPS = 24


@dataclass(frozen=True)
class Case:
    """A server of one mechanism.

    Attributes:
        least: acceptance length of its draft, at least.
    """

    kind: str
    live: Live
    policy: Path
    draft: Path
    least: float


@pytest.fixture(scope="module", params=["mtp", "draft_model", "pard", "dflash"])
def case(
    request: pytest.FixtureRequest,
    serve,  # type: ignore[no-untyped-def]
    policy_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    if request.param == "mtp":
        policy = policy_with_mtp(policy_dir, folder / "policy")
        draft, least = ARITHMETIC / "mtp", 2.0
    elif request.param == "dflash":
        policy, draft, least = policy_dir, ARITHMETIC / "dflash", 2.0
    elif request.param == "pard":
        kind = "draft_model"
        policy, draft, least = policy_dir, ARITHMETIC / "pard", 2.0
    else:
        policy, draft, least = policy_dir, first_layers(policy_dir, folder / "draft"), 1.1
    live = serve("--draft-kind", kind, policy=policy, draft=draft)
    yield Case(kind, live, policy, draft, least)
    live.stop()


def model_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_qwen3_next_conversion_keeps_logits(policy_dir: Path, tmp_path: Path) -> None:
    ids = torch.tensor(prompts(4))
    converted = policy_with_mtp(policy_dir, tmp_path / "policy")
    with torch.no_grad():
        before, after = (model_of(folder)(ids).logits for folder in (policy_dir, converted))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.vllm
def test_swaps_with_requests_in_flight_are_lossless(case: Case) -> None:
    """Greedy completions are those without speculation, and samples are the policy's.

    Null of the samples: every token is drawn from the policy's own distribution at T = 1
    (``Z_BOUND``).
    """
    live, state, batch = case.live, case.live.state(), prompts(64)
    assert (state.draft_kind, state.draft_version) == (case.kind, 0)
    live.speculate(False)
    plain = live.generate(batch)
    live.speculate(True)
    draft = load(case.draft)
    tokens = [prompt_ids(problem) for problem in held_out_problems(64)]
    with live.generating(batch) as rounds, live.generating(tokens, temperature=1.0) as sampled:
        list(swap_many(live, draft, SWAPS))
    assert all(completions == plain for completions in rounds)
    found = surprise(model_of(case.policy), tokens * len(sampled), [*chain(*sampled)])
    assert found.tokens > 2000 and found.worst < Z_BOUND, found
    state = live.state()
    assert (state.draft_version, state.draft_commits, state.not_ready) == (SWAPS, SWAPS, "")
    assert live.counters()[1].drafts > 0
    if case.kind != "draft_model":
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            with pytest.raises(RefusedError, match=name.removeprefix("model.")):
                live.stage("draft", "theirs", 99, draft | {name: torch.zeros(128, 192)})


@pytest.mark.vllm
def test_replay_predicts_measured_acceptance(case: Case) -> None:
    case.live.swap(SWAPS + 1, load(case.draft))
    replay(case, model_of(case.policy), case.least)


@pytest.mark.vllm
@pytest.mark.parametrize("case", ["mtp", "dflash"], indirect=True)
def test_replay_predicts_acceptance_after_policy_push(case: Case) -> None:
    """Whose embeddings and lm_head these drafts follow; a draft model has its own of both."""
    model = model_of(case.policy)
    moved = perturbed(dict(model.state_dict()), scale=0.05, seed=3)
    model.load_state_dict(moved)
    case.live.stage("policy", "moved", 1, moved)
    case.live.commit("moved")
    replay(case, model, least=1.3)


def replay(case: Case, model: PreTrainedModel, least: float) -> None:
    tokens = [prompt_ids(problem) for problem in held_out_problems(ROLLOUTS)]
    # Behind the end of a completion, which the replay does not see, a draft model that resembles
    # the policy goes on to be accepted: its completions end by their length, after many steps.
    endless = {"ignore_eos": True, "max_tokens": 160} if case.kind == "draft_model" else {}
    draft = DRAFTERS[case.kind].read(case.draft, case.policy).draft()
    some = tokens[: 3 * ROLLOUTS // 16] if endless else tokens
    assert_replay(case.live, model, draft, some, least, **endless)
