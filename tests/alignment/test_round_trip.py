"""Train, write a release, load it in vLLM: the logits that vLLM drafts from equal torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.batch import batches
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.registry import Registry
from draft_trainer.training.learner import Learner
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids, sample
from examples.local_services import DRAFT_LENGTH
from slipstream.v1 import release_pb2
from tests.alignment.recorded import policy_heads, record
from tests.draft_trainer.synthetic import logits_of, run_apart

pytestmark = [pytest.mark.vllm, pytest.mark.contract("alignment")]

TOLERANCE = 2e-3
"""Absolute, on logits of spread about 10: float32 on both sides, other orders of summation."""


def test_trained_release_has_equal_logits_in_vllm(
    policy_dir: Path, draft_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
    head = Eagle3().read(draft_dir).draft()
    assert head.draft_vocab_ids is not None
    layers = head.config.aux_layer_ids
    heads = policy_heads(model, head.target_ids())
    prompts = [prompt_ids(problem) for problem in held_out_problems(8)]
    rollouts = sample(model, prompts, generator=torch.Generator().manual_seed(0)).completions
    before = {name: value.clone() for name, value in head.state_dict().items()}
    learner = Learner(head.float(), TrainingConfig(warmup_steps=0, ttt_steps=DRAFT_LENGTH))
    metrics = learner.step(record(model, prompts, rollouts, layers), heads)
    assert not metrics.skipped

    registry = Registry(tmp_path / "releases")
    registry.import_initial(draft_dir)
    snapshot = learner.snapshot()
    manifest = registry.create(
        snapshot,
        release_pb2.ReleaseManifest(
            parent_version=0, trained_against_policy_version=0, ttt_steps=DRAFT_LENGTH
        ),
    )
    release = registry.path(manifest.draft_version)
    released = Eagle3().read(release).draft()
    # Norm weights sit at 1.0, where 1e-3 is below bf16's resolution; every matrix must have moved.
    for name, value in released.state_dict().items():
        assert value.dim() == 1 or not torch.equal(value, before[name]), name

    drafted = vllm_draft(policy_dir, release, prompts[0], tmp_path)
    # The chain as vLLM walked it: the prompt, the token it sampled, then its own drafts.
    chain = [int(drafted["first"]), *drafted["drafts"].tolist()]
    sample_, *_ = record(model, [prompts[0]], [chain], layers)
    anchor = len(prompts[0]) - 1
    batch, *_ = batches([sample_], heads, 4096)
    with torch.no_grad():
        outputs = list(released.float().unroll(batch, DRAFT_LENGTH))
    for step, output in enumerate(outputs):
        ours = logits_of(released, output)[0, anchor]
        theirs = drafted[f"logits{step}"]
        assert ours.std() > 1.0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def vllm_draft(
    policy: Path, release: Path, prompt: list[int], folder: Path
) -> dict[str, torch.Tensor]:
    """First sampled token, its drafts, and their logits, from an in-process vLLM engine."""
    out = folder / "drafted.safetensors"
    job = {
        "policy": str(policy),
        "release": str(release),
        "prompt": prompt,
        "out": str(out),
        "k": DRAFT_LENGTH,
    }
    run_apart("tests.alignment.vllm_draft", job, 600)
    return load_file(out)
