"""Recording without a loop: capture of a Hugging Face policy against the policy's own states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.recordings.recording import Recording
from examples.arithmetic_grpo.record import Recorder, Rollout, read_rollouts, solutions
from slipstream.errors import RefusedError
from tests.alignment.recorded import record

LAYERS = (2, 5, 7)


@pytest.fixture(scope="module")
def model(policy_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rollouts(model: PreTrainedModel) -> list[Rollout]:
    (drawn,) = solutions(model, 6, seed=3)
    return drawn


def test_states_are_the_policys_own(
    tmp_path: Path, model: PreTrainedModel, rollouts: list[Rollout]
) -> None:
    with Recorder(model, tmp_path, aux_layer_ids=LAYERS, states_dtype=None) as recorder:
        recorder.add(rollouts, batch_tokens=150)  # padded rows, several passes
    recording = Recording(tmp_path)
    prompts, completions = zip(*rollouts, strict=True)
    expected = {tuple(s.token_ids.tolist()): s for s in record(model, prompts, completions, LAYERS)}
    assert len(recording) == len(expected) == 6
    for found in (recording[i] for i in range(6)):
        own = expected[tuple(found.token_ids.tolist())]
        assert torch.equal(found.loss_mask, own.loss_mask)
        assert torch.equal(found.positions, own.positions.int())
        for name in ("aux", "final_hidden", "sampled_logprobs", "sampled_logits"):
            torch.testing.assert_close(
                getattr(found, name), getattr(own, name), rtol=1e-4, atol=1e-4, msg=name
            )
    heads = recording.policy_heads(torch.arange(128))
    assert torch.equal(heads.get(0).lm_head_rows, model.lm_head.weight)
    assert torch.equal(heads.get(0).embed_tokens, model.model.embed_tokens.weight)


def test_long_sequences_become_windows(
    tmp_path: Path, model: PreTrainedModel, rollouts: list[Rollout]
) -> None:
    """Every completion token is a target once; what windows repeat is context."""
    with Recorder(model, tmp_path, aux_layer_ids=LAYERS, max_tokens=24) as recorder:
        recorder.add(rollouts)
    recording = Recording(tmp_path)
    samples = [recording[i] for i in range(len(recording))]
    assert max(sample.tokens for sample in samples) == 24 and len(samples) > 6
    assert samples[0].aux.dtype == torch.bfloat16
    targets = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert targets == sum(len(completion) for _, completion in rollouts)


def test_rollouts_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt": [1, 2], "completion": [3]}\n{"prompt": [4], "completion": []}\n')
    assert read_rollouts(path) == [([1, 2], [3]), ([4], [])]
    for line in ('{"prompt": [1]}', "no", '{"prompt": "text", "completion": [1]}', "[1]"):
        path.write_text('{"prompt": [1], "completion": [2]}\n' + line)
        with pytest.raises(RefusedError, match="line 2"):
            read_rollouts(path)
