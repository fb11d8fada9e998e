"""Speculation is lossless while requests span several policies and drafts.

Null: the server draws token i of a completion from the policy version that it names for it, with
the keys and values of the tokens before it as the versions before left them in the cache. That is
what generation without speculation under the same commits draws from. Statistic: the two sums of
``joint.Surprise`` over every token, with the distributions computed by torch from the spans that
the server names. Refused at |z| > 3.9: a correct server fails one run in 5,000.

What is assumed: that commits fall where they do independently of the tokens that are drawn after
them. They are made on a clock.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids, sample
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS
from policy_bridge.adapters.completions import Completion, CompletionsClient
from slipstream.errors import RefusedError
from tests.losslessness.joint import Z_BOUND, SurpriseSums, log_probs_over_versions
from tests.rollout_server.live import Live

pytestmark = [pytest.mark.contract("lossless"), pytest.mark.slow]

PROMPTS = {"V1": 64, "V2": 8}
"""The prompts by runner: V2 is interpreted."""
SAMPLES = 8
NOISE, SHARPNESS = 0.5, 0.7
"""The second policy's noise in a matrix's own spread, and the factor of its logits."""


@pytest.fixture(scope="module")
def policies(policy_dir: Path) -> list[PreTrainedModel]:
    """Two that differ; version n is the one at n modulo 2."""
    first = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
    second = copy.deepcopy(first)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in second.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(NOISE * parameter.std() * noise)
        second.model.norm.weight.mul_(SHARPNESS)
    return [first, second]


def worst(
    policies: list[PreTrainedModel], prompts: list[list[int]], rows: list[Completion]
) -> float:
    """|z| of the completions under the versions that they name."""
    sums = SurpriseSums()
    for prompt, row in zip(prompts, rows, strict=True):
        starts, versions = zip(*row.spans, strict=True)
        models = [policies[version % 2] for version in versions]
        tokens = torch.tensor(row.token_ids)
        sums.add(log_probs_over_versions(models, prompt, row.token_ids, starts), tokens)
    return sums.result().worst


class Committer:
    """Commits the other policy and the other draft for as long as the context lasts.

    In turn: both together, the policy alone, the draft alone.
    """

    def __init__(
        self, server: Live, policies: list[PreTrainedModel], draft: Mapping[str, torch.Tensor]
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        ruined = {
            name: tensor
            if tensor.dtype in (torch.int64, torch.bool)
            else (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)
            for name, tensor in draft.items()
        }
        self._server, self._drafts = server, [dict(draft), ruined]
        self._weights = [model.state_dict() for model in policies]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.policies = self.drafts = 0
        self.error: BaseException | None = None

    def _stage(self, kind: str) -> str:
        if kind == "policy":
            version, tensors = self.policies + 1, self._weights[(self.policies + 1) % 2]
        else:
            version, tensors = 2_000_000 + self.drafts, self._drafts[(self.drafts + 1) % 2]
        name = f"in-flight-{kind}-{version}"
        self._server.stage(kind, name, version, tensors)
        return name

    def _run(self) -> None:
        try:
            turn = 0
            while not self._stop.wait(0.05):
                kinds = (["policy", "draft"], ["policy"], ["draft"])[turn % 3]
                self._server.commit(*map(self._stage, kinds))
                self.policies += "policy" in kinds
                self.drafts += "draft" in kinds
                turn += 1
        except (grpc.RpcError, RefusedError) as error:
            self.error = error  # carried to the test's own thread

    def __enter__(self) -> Committer:
        self._server.stage("policy", "in-flight-start", 0, self._weights[0])
        self._server.commit("in-flight-start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._server.stage("policy", "in-flight-end", 0, self._weights[0])
        self._server.stage("draft", "in-flight-end-draft", 0, self._drafts[0])
        self._server.commit("in-flight-end", "in-flight-end-draft")
        if self.error:
            raise self.error


@pytest.mark.vllm
def test_sampled_token_matches_the_policy_version_named(
    live: Live, policies: list[PreTrainedModel], draft_dir: Path
) -> None:
    prompts = [prompt_ids(problem) for problem in held_out_problems(PROMPTS[live.runner])]
    repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
    draft = load_file(draft_dir / "model.safetensors")
    preempted = live.metric("vllm:num_preemptions_total")
    sampling = {"temperature": 1.0, "max_tokens": MAX_COMPLETION_TOKENS}
    # A request that fails is an error here.
    with (
        CompletionsClient([live.http], "policy") as client,
        Committer(live, policies, draft) as committer,
    ):
        rows = client.generate(repeated, sampling)
    assert len(rows) == len(repeated)
    assert committer.policies >= 3 and committer.drafts >= 3
    # A request that is preempted computes its keys and values again, by one version.
    assert live.metric("vllm:num_preemptions_total") == preempted
    assert sum(len(row.spans) > 1 for row in rows) > len(rows) // 4
    found = {(c.draft_version, c.policy_version): c.drafts for c in live.acceptance().pairs}
    assert len({draft for draft, _ in found}) > 1 and len({policy for _, policy in found}) > 2
    assert worst(policies, repeated, rows) < Z_BOUND
    if live.runner == "V2":
        return  # too few tokens for what follows
    # Power: the same tokens as if one policy had sampled them all, or each the other one. Where
    # most completions span many versions, the latter's two errors cancel in part: z is about 7.
    assert worst([policies[0]] * 2, repeated[::2], rows[::2]) > Z_BOUND
    assert worst(policies[::-1], repeated, rows) > Z_BOUND


def test_log_probs_over_versions_match_each_model(
    policies: list[PreTrainedModel],
) -> None:
    prompt = prompt_ids(held_out_problems(1)[0])
    row = sample(policies[0], [prompt], generator=torch.Generator().manual_seed(0)).completions[0]

    def alone(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *row[:-1]]])).logits[0, len(prompt) - 1 :]
        return logits.double().log_softmax(-1)

    one = log_probs_over_versions(policies[:1], prompt, row, [0])
    torch.testing.assert_close(one, alone(policies[0]), atol=1e-4, rtol=1e-4)
    same = log_probs_over_versions([policies[0]] * 3, prompt, row, [0, 3, 9])
    torch.testing.assert_close(same, one, atol=1e-4, rtol=1e-4)
    # Tokens before the commit are of the first model; after it neither model alone is right.
    mixed = log_probs_over_versions(policies, prompt, row, [0, 5])
    assert mixed.shape == one.shape
    torch.testing.assert_close(mixed[:5], one[:5], atol=1e-4, rtol=1e-4)
    for model in policies:
        assert float((mixed[6:] - alone(model)[6:]).abs().max()) > 1e-2
