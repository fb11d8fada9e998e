"""The torch replay predicts the acceptance that vLLM measures, position by position, within 2 %.

Both drafting modes. The estimate and the measurement share the recorded rollouts, so their
difference holds only what the acceptance draws add: with the figures used here (about 10,000
verification steps) its standard error is at most 0.005 at a position, a quarter of the tolerance,
so a right alignment fails one run in some thousands. An alignment error (one position, one
auxiliary layer, one RoPE step) moves it by tens of per cent.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_trainer.drafters.acceptance import expected_acceptance
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from examples.arithmetic_grpo.rollouts import SpecCounters, parse_counters
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS
from examples.local_services import DRAFT_LENGTH
from tests.alignment.recorded import policy_heads, record
from tests.rollout_server.live import Live

pytestmark = pytest.mark.vllm

ROLLOUTS = 1024
TOLERANCE = 0.02


def generate(server: Live, prompts: list[list[int]], **more: object) -> list[list[int]]:
    sampling = {"max_tokens": MAX_COMPLETION_TOKENS, "temperature": 1.0} | more
    return [list(completion) for completion in server.complete(prompts, **sampling)]


def counters(server: Live) -> SpecCounters:
    return parse_counters(httpx.get(f"{server.http}/metrics", timeout=30).text)


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_replay_predicts_measured_acceptance(
    method: str, request: pytest.FixtureRequest, policy_dir: Path, draft_dir: Path
) -> None:
    if method == "probabilistic":
        server = request.getfixturevalue("server")
    else:
        server = request.getfixturevalue("serve")("--draft-sample-method", "greedy")
    problems = held_out_problems(ROLLOUTS)
    prompts = [prompt_ids(problem) for problem in problems]
    before = counters(server)
    completions = generate(server, prompts)
    measured = counters(server).since(before)
    assert measured.drafts > 8000

    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
    head = Eagle3().read(draft_dir).draft()
    assert head.draft_vocab_ids is not None, "the demo's draft has a reduced vocabulary"
    layers = head.config.aux_layer_ids
    predicted = expected_acceptance(
        head.float(),
        record(model, prompts, completions, layers),
        policy_heads(model, head.target_ids()),
        DRAFT_LENGTH,
        method,  # type: ignore[arg-type]
    )
    assert predicted.acceptance_length == pytest.approx(measured.acceptance_length, rel=TOLERANCE)
    for position, accepted in enumerate(measured.per_position):
        assert predicted.accepted_per_position[position] == pytest.approx(
            accepted / measured.drafts, abs=TOLERANCE
        ), f"draft position {position}"
    # A head that proposes nothing useful would pass a comparison of ones with ones.
    assert measured.acceptance_length is not None
    assert measured.acceptance_length > 2.0
