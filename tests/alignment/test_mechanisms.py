"""MTP heads, draft models and block drafts on real vLLM: the replay predicts, swaps lose nothing.

The MTP head's policy is the example's, written as the Qwen3-Next model that it is, and as a GLM-4.5
model with experts; ERNIE 4.5's is random, because none of the example's is a model of that kind.
The draft model is the first layers of the example's policy; "pard" is one that drafts in parallel.
Tolerance and rollouts are those of ``test_replay``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.dspark import DsparkConfig, DsparkHead
from examples.arithmetic_grpo.make_mtp import first_layers, new_head, policy_with_mtp
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.local_services import ARITHMETIC
from slipstream.v1 import rollout_server_pb2 as pb
from tests.alignment.ernie import random_policy
from tests.alignment.glm import as_glm, glm_head
from tests.alignment.test_replay import ROLLOUTS, assert_replay
from tests.losslessness.joint import Z_BOUND, surprise
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, RefusedError, prompts, swap_many

pytestmark = [pytest.mark.contract("alignment"), pytest.mark.slow]

SWAPS = 8
# Behind the end of a completion, which the replay does not see, a draft model that resembles the
# policy goes on to be accepted: its completions end by their length, after many steps.
ENDLESS = {"ignore_eos": True, "max_tokens": 160}
OF_THE_POLICY = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.layers.10.shared_head.head.weight",
)


@cache
def problems() -> list[list[int]]:
    """Prompts of the example's task."""
    return [prompt_ids(problem) for problem in held_out_problems(ROLLOUTS)]


@dataclass(frozen=True)
class Mechanism:
    """A policy and a draft of it.

    Attributes:
        kind: of the draft.
        policy: checkpoint.
        draft: checkpoint.
        least: acceptance length of the draft, at least.
        rollouts: prompts of the replay.
        sampling: options of the replay's requests.
    """

    kind: str
    policy: Path
    draft: Path
    least: float
    rollouts: list[list[int]] = field(default_factory=problems)
    sampling: Mapping[str, object] = field(default_factory=dict)


def save_head(folder: Path, head: Draft) -> Path:
    """An MTP head as a checkpoint; answers the folder."""
    folder.mkdir()
    DRAFTERS["mtp"].save(folder, head, torch.float32)
    return folder


def with_markov_head(dflash: Path, folder: Path) -> Path:
    """A DFlash draft with a random Markov head and a confidence head, in DFlash's layout."""
    document = json.loads((dflash / "config.json").read_text())
    document |= document.pop("dflash_config") | {
        "architectures": ["Qwen3DSparkModel"],
        "sample_from_anchor": False,
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    torch.manual_seed(0)
    head = DsparkHead(DsparkConfig.from_dict(document))
    torch.nn.init.normal_(head.get_parameter("markov_head.markov_w2.weight"), 0.0, 0.3)
    head.load_state_dict(load(dflash), strict=False)
    folder.mkdir()
    DRAFTERS["dspark"].save(folder, head, torch.float32)
    return folder


def make(name: str, example: Path, folder: Path) -> Mechanism:
    """A mechanism by its name.

    Args:
        name: of ``case``.
        example: the example's policy.
        folder: where new checkpoints go.
    """
    if name == "mtp":
        policy = policy_with_mtp(example, folder / "policy")
        # Nine in ten of its tokens and more are accepted: half of the steps have that error.
        return Mechanism("mtp", policy, ARITHMETIC / "mtp", 2.0, problems()[: ROLLOUTS // 2])
    if name == "glm":
        policy = as_glm(example, folder / "policy")
        return Mechanism("mtp", policy, save_head(folder / "head", glm_head(policy)), 1.3)
    if name == "ernie":
        policy = random_policy(example, folder / "policy")
        head = save_head(folder / "head", new_head(policy, seed=0))
        return Mechanism("mtp", policy, head, 1.1, prompts(160, seed=5))
    if name == "dflash":
        return Mechanism("dflash", example, ARITHMETIC / "dflash", 2.0)
    if name == "pard":
        some, draft, least = problems()[: ROLLOUTS // 8], ARITHMETIC / "pard", 2.0
    else:
        some, least = problems()[: 3 * ROLLOUTS // 16], 1.1
        draft = first_layers(example, folder / "draft")
    return Mechanism("draft_model", example, draft, least, some, ENDLESS)


@dataclass(frozen=True)
class Case:
    """A server of one mechanism."""

    live: Live
    made: Mechanism


@pytest.fixture(scope="module", params=["mtp", "glm", "ernie", "draft_model", "pard", "dflash"])
def case(
    request: pytest.FixtureRequest,
    serve,  # type: ignore[no-untyped-def]
    policy_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    made = make(request.param, policy_dir, tmp_path_factory.mktemp(request.param))
    live = serve("--draft-kind", made.kind, policy=made.policy, draft=made.draft)
    yield Case(live, made)
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
    live, made, state, batch = case.live, case.made, case.live.state(), prompts(64)
    assert (state.draft_kind, state.draft_version) == (made.kind, 0)
    live.speculate(False)
    plain = live.generate(batch)
    live.speculate(True)
    draft, tokens = load(made.draft), problems()[:64]
    with live.generating(batch) as rounds, live.generating(tokens, temperature=1.0) as sampled:
        list(swap_many(live, draft, SWAPS))
    assert all(completions == plain for completions in rounds)
    found = surprise(model_of(made.policy), tokens * len(sampled), [*chain(*sampled)])
    assert found.tokens > 2000 and found.worst < Z_BOUND, found
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert (state.draft_version, state.draft_commits, not state.not_ready) == (SWAPS, SWAPS, True)
    assert live.counters()[1].drafts > 0
    if made.kind != "draft_model":
        for name in OF_THE_POLICY:
            with pytest.raises(RefusedError, match=name.removeprefix("model.")):
                live.stage("draft", "theirs", 99, draft | {name: torch.zeros(128, 192)})


@pytest.mark.vllm
def test_replay_predicts_acceptance(case: Case) -> None:
    case.live.swap(SWAPS + 1, load(case.made.draft))
    replay(case, case.made.policy, case.made.least)


@pytest.mark.vllm
@pytest.mark.parametrize("case", ["mtp", "glm", "dflash"], indirect=True)
def test_replay_predicts_acceptance_after_policy_push(case: Case, tmp_path: Path) -> None:
    """Whose embeddings and lm_head these drafts follow; a draft model has its own of both.

    A push of the same policy changes nothing.
    """
    live, policy, batch = case.live, case.made.policy, prompts(16)
    before, weights = live.generate(batch), load(policy)
    moved = perturbed(weights, scale=0.05, seed=3)
    for version, pushed in enumerate((weights, moved), 1):
        live.stage("policy", f"policy-{version}", version, pushed)
        live.commit(f"policy-{version}")
        assert (live.generate(batch) == before) is (pushed is weights)
    folder = shutil.copytree(policy, tmp_path / "moved")
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    replay(case, folder, least=1.3)


@pytest.mark.vllm
def test_dspark_on_runner_v2(
    serve,  # type: ignore[no-untyped-def]
    policy_dir: Path,
    tmp_path: Path,
) -> None:
    """Its proposals depend on each other as the replay says, before and after a swap.

    Some 900 verification steps: three standard errors of a position are at most 0.05.
    """
    draft = with_markov_head(ARITHMETIC / "dflash", tmp_path / "draft")
    live = serve("--draft-kind", "dspark", draft=draft, runner="V2")
    assert live.state().draft_kind == "dspark"
    live.speculate(False)
    plain = live.generate(live.batch)
    live.speculate(True)
    model = model_of(policy_dir)
    for version, tensors in enumerate((load(draft), perturbed(load(draft), scale=0.2, seed=1))):
        if version:
            live.swap(version, tensors)
            save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        assert live.generate(live.batch) == plain
        head = DRAFTERS["dspark"].read(draft, policy_dir).draft()
        assert_replay(live, model, head, problems()[:96], least=1.3, tolerance=0.05)
    live.stop()


def replay(case: Case, policy: Path, least: float) -> None:
    """``assert_replay`` of a checkpoint that is served, with the draft that is."""
    made = case.made
    draft = DRAFTERS[made.kind].read(made.draft, policy).draft()
    assert_replay(case.live, model_of(policy), draft, made.rollouts, least, **made.sampling)
