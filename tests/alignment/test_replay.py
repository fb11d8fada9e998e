"""The torch replay predicts the acceptance that vLLM measures, position by position, within 2 %.

Both drafting modes. The estimate and the measurement share the recorded rollouts, so their
difference holds only what the acceptance draws add: with the figures used here (about 10,000
verification steps) its standard error is at most 0.005 at a position, a quarter of the tolerance,
so a right alignment fails one run in some thousands. An alignment error (one position, one
auxiliary layer, one RoPE step) moves it by tens of per cent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.checkpoints import read_policy_config
from draft_trainer.cli.main import main
from draft_trainer.drafters import Draft
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.expected_acceptance import Method, expected_acceptance
from examples.arithmetic_grpo import task
from examples.arithmetic_grpo.make_draft import configuration, write_rollouts
from examples.arithmetic_grpo.rollouts import SpecCounters
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS
from examples.local_services import DRAFT_LENGTH
from tests.alignment.recorded import policy_heads, record
from tests.rollout_server.live import Live

pytestmark = [pytest.mark.vllm, pytest.mark.contract("alignment")]

ROLLOUTS = 1024
TOLERANCE = 0.02


def generate(server: Live, prompts: list[list[int]], **more: object) -> list[list[int]]:
    sampling = {"max_tokens": MAX_COMPLETION_TOKENS, "temperature": 1.0} | more
    return [list(completion) for completion in server.complete(prompts, **sampling)]


def assert_replay(
    live: Live,
    model: PreTrainedModel,
    draft: Draft,
    prompts: list[list[int]],
    least: float,
    method: Method = "probabilistic",
    tolerance: float = TOLERANCE,
    **sampling: object,
) -> SpecCounters:
    """Rollouts of the served policy are accepted as their replay with the draft says.

    Args:
        live: serves both.
        model: the policy that it serves, in float32.
        draft: that it serves, in float32.
        prompts: one rollout of each.
        least: acceptance length that vLLM measures, at least: a draft that proposes nothing useful
            would pass a comparison of ones with ones.
        method: how vLLM drafts.
        tolerance: of each position's acceptance, and of the length relative to itself.
        sampling: options of the requests.

    Returns:
        What vLLM counted of these rollouts.
    """
    before = live.counters()
    completions = generate(live, prompts, **sampling)
    measured = SpecCounters.between(before, live.counters())
    predicted = expected_acceptance(
        draft,
        record(model, prompts, completions, draft.config.aux_layer_ids),
        policy_heads(model, draft.target_ids()),
        DRAFT_LENGTH,
        method,
    )
    length = measured.acceptance_length
    print(f"{predicted.acceptance_length} predicted, {length} measured in {measured.drafts} steps")
    assert predicted.acceptance_length == pytest.approx(length, rel=tolerance)
    for position, accepted in enumerate(measured.per_position):
        assert predicted.accepted_per_position[position] == pytest.approx(
            accepted / measured.drafts, abs=tolerance
        ), f"draft position {position}"
    assert length is not None and length > least
    return measured


@pytest.mark.parametrize(
    "method", ["probabilistic", pytest.param("greedy", marks=pytest.mark.slow)]
)
def test_replay_predicts_measured_acceptance(
    method: Method, request: pytest.FixtureRequest, policy_dir: Path, draft_dir: Path
) -> None:
    if method == "probabilistic":
        server = request.getfixturevalue("server")
    else:
        server = request.getfixturevalue("serve")("--draft-sample-method", "greedy")
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
    head = Eagle3().read(draft_dir).draft().float()
    assert head.draft_vocab_ids is not None, "the demo's draft has a reduced vocabulary"
    prompts = [prompt_ids(problem) for problem in held_out_problems(ROLLOUTS)]
    assert assert_replay(server, model, head, prompts, least=2.0, method=method).drafts > 8000


@pytest.mark.slow
def test_replay_of_a_draft_with_the_norms_of_eagle_3_1(
    serve: Callable[..., Live], policy_dir: Path, tmp_path: Path
) -> None:
    """It has all three, reads after the last layer, and is what ``draft-trainer warmup`` makes."""
    file = write_rollouts(task, policy_dir, tmp_path / "rollouts.jsonl", 768, seed=0)
    config = configuration(tmp_path, epochs=3, threads=1, block=False)
    norms = ("norm_output", "fc_norm", "qk_norm")
    given = ("--policy", policy_dir, "--rollouts", file, "--config", config, "--norms", *norms)
    given += ("--aux-layers", "2,5,10")
    assert main(["warmup", *map(str, given), "--out", str(tmp_path / "draft")]) == 0
    head = Eagle3().read(tmp_path / "draft").draft()
    assert all(getattr(head.config, name) for name in norms)
    assert head.config.aux_layer_ids[-1] == read_policy_config(policy_dir)["num_hidden_layers"]
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
    prompts = [prompt_ids(problem) for problem in held_out_problems(ROLLOUTS)]
    assert_replay(serve(draft=tmp_path / "draft"), model, head, prompts, least=1.3)
