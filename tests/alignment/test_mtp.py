"""A native MTP head on real vLLM: the replay predicts its acceptance, and swaps lose nothing.

The policy is the example's, written as the Qwen3-Next model that it is. Tolerance and number of
rollouts are those of ``test_replay``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.drafters.acceptance import expected_acceptance
from draft_trainer.drafters.mtp.checkpoint import Mtp
from examples.arithmetic_grpo.make_mtp import policy_with_mtp
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.local_services import ARITHMETIC, DRAFT_LENGTH
from tests.alignment.recorded import policy_heads, record
from tests.alignment.test_replay import ROLLOUTS, TOLERANCE, counters, generate
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, RefusedError, prompts

pytestmark = pytest.mark.vllm
HEAD = ARITHMETIC / "mtp"
SWAPS = 24


@pytest.fixture(scope="module")
def converted(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_with_mtp(policy_dir, tmp_path_factory.mktemp("mtp") / "policy")


@pytest.fixture(scope="module")
def live(serve, converted: Path) -> Live:  # type: ignore[no-untyped-def]
    return serve(policy=converted, draft=HEAD)


def model_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_conversion_changes_no_logit(policy_dir: Path, converted: Path) -> None:
    ids = torch.tensor(prompts(4))
    with torch.no_grad():
        before, after = (model_of(folder)(ids).logits for folder in (policy_dir, converted))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_swaps_with_requests_in_flight_lose_nothing(live: Live) -> None:
    state, batch = live.state(), prompts(64)
    assert (state.draft_kind, state.draft_version) == ("mtp", 0)
    live.speculate(False)
    plain = live.generate(batch)
    live.speculate(True)
    head = load(HEAD)
    with live.generating(batch) as rounds:
        for number in range(1, SWAPS + 1):
            other = perturbed(head, scale=2.0, seed=number)
            result = live.stage("draft", f"swap-{number}", number, other if number % 2 else head)
            assert result.not_prepared == "", "the standby copy takes an MTP head"
            live.commit(f"swap-{number}")
    assert all(completions == plain for completions in rounds)
    state = live.state()
    assert (state.draft_version, state.draft_commits, state.not_ready) == (SWAPS, SWAPS, "")
    assert live.counters()[1].drafts > 0
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with pytest.raises(RefusedError, match=name.removeprefix("model.")):
            live.stage("draft", "theirs", 99, head | {name: torch.zeros(128, 192)})


@pytest.mark.parametrize("pushed", [False, True])
def test_replay_predicts_measured_acceptance(live: Live, converted: Path, pushed: bool) -> None:
    """Also after a push of another policy: embeddings and lm_head of the head follow it."""
    model = model_of(converted)
    live.swap(SWAPS + 1 + pushed, load(HEAD))
    if pushed:
        moved = perturbed(dict(model.state_dict()), scale=0.05, seed=3)
        model.load_state_dict(moved)
        live.stage("policy", "moved", 1, moved)
        live.commit("moved")
    tokens = [prompt_ids(problem) for problem in held_out_problems(ROLLOUTS)]
    before = counters(live)
    completions = generate(live, tokens)
    measured = counters(live).since(before)
    head = Mtp().read(HEAD, converted).draft()
    predicted = expected_acceptance(
        head,
        record(model, tokens, completions, ()),
        policy_heads(model, head.target_ids()),
        DRAFT_LENGTH,
        "probabilistic",
    )
    assert predicted.acceptance_length == pytest.approx(measured.acceptance_length, rel=TOLERANCE)
    for position, accepted in enumerate(measured.per_position):
        assert predicted.accepted_per_position[position] == pytest.approx(
            accepted / measured.drafts, abs=TOLERANCE
        ), f"draft position {position}"
    # A head that proposes nothing useful would pass a comparison of ones with ones.
    assert measured.acceptance_length is not None
    assert measured.acceptance_length > (1.3 if pushed else 2.0)
