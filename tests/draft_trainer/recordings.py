"""Recordings for tests: of the synthetic policy, and of the trained tiny one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.offline.record import Recorder
from draft_trainer.recordings.recorder import DEFAULT_SHARD_BYTES, RecordingWriter
from draft_trainer.recordings.recording import RecordingFacts, RecordingIndex
from examples.arithmetic_grpo.sampling import solutions
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy

FACTS = RecordingFacts(
    run_id="run", hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=8, aux_layer_ids=(2, 4, 5)
)


def record_synthetic(
    folder: Path,
    samples: list[Sample],
    policies: dict[int, Policy],
    rows: torch.Tensor | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> RecordingIndex:
    """Samples of synthetic policies by version; ``rows``: only these rows of lm_head."""
    with RecordingWriter(folder, FACTS, shard_bytes) as writer:
        for version, policy in policies.items():
            lm_head = policy.lm_head if rows is None else policy.lm_head[rows]
            writer.add_policy(PolicyHead(version, lm_head, policy.embed), rows)
        for sample in samples:
            writer.add(sample)
    return writer.index


def same(found: Sample, expected: Sample) -> bool:
    """Equal descriptions and equal bytes; a sample that was sent has a checksum too."""
    return _described(found) == _described(expected) and torch.equal(
        found.block[: found.nbytes], expected.block[: expected.nbytes]
    )


def _described(sample: Sample) -> pb.VerifierStates:
    header = pb.VerifierStates()
    header.CopyFrom(sample.header)
    for name in ("span", "checksum"):
        header.packed.ClearField(name)
    return header


def record_tiny(folder: Path, policy_dir: Path, count: int) -> Path:
    """Solutions of the trained tiny policy, in float32 forward passes and bfloat16 states."""
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()
    with Recorder(model, folder) as recorder:
        for rollouts in solutions(model, count, seed=1):
            recorder.add(rollouts)
    return folder
