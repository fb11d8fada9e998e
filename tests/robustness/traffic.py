"""Messages of a sound client: samples of the example's policy, matrices, stages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

import numpy as np
import torch
from safetensors.torch import load_file

from examples.local_services import ARITHMETIC
from slipstream.sample import Sample, header_of, layout_of
from slipstream.tensors import SCHEMA_VERSION, checksum_of, chunks_of, spec_of
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import rollout_server_pb2 as rollout_pb

_CONFIG = json.loads((ARITHMETIC / "draft" / "config.json").read_text())
_POLICY = json.loads((ARITHMETIC / "policy" / "config.json").read_text())
LAYERS = tuple(_CONFIG["eagle_aux_hidden_state_layer_ids"])
HIDDEN, VOCAB, DRAFT_VOCAB = (
    _CONFIG[key] for key in ("target_hidden_size", "vocab_size", "draft_vocab_size")
)
TOKENS = 8
"""Tokens of a sample."""


def open_run() -> pb.OpenRunRequest:
    """Open a run of the example's policy."""
    return pb.OpenRunRequest(
        run_id="robustness",
        policy=pb.PolicySpec(
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            num_hidden_layers=_POLICY["num_hidden_layers"],
            model_name="example",
        ),
        client="robustness",
        schema_version=SCHEMA_VERSION,
    )


def matrices() -> dict[str, torch.Tensor]:
    """The matrices of one policy version."""
    made = torch.Generator().manual_seed(0)
    return {
        "lm_head.weight": torch.randn(DRAFT_VOCAB, HIDDEN, generator=made) / 8,
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=made),
    }


def announcement(session_id: str, version: int) -> list[pb.AnnouncePolicyRequest]:
    """Header and chunks."""
    tensors = matrices()
    header = pb.AnnouncePolicyHeader(
        session_id=session_id,
        policy_version=version,
        tensors=[spec_of(name, tensor) for name, tensor in tensors.items()],
    )
    chunks = [pb.AnnouncePolicyRequest(chunk=chunk) for chunk in chunks_of(tensors)]
    return [pb.AnnouncePolicyRequest(header=header), *chunks]


def sample(version: int = 1) -> pb.VerifierStates:
    """The header of one whose block is not made yet: ``batch`` does that.

    Its id is none that fuzzing makes of another one: numbers in their order it met.
    """
    layout = layout_of(TOKENS, len(LAYERS), HIDDEN, torch.bfloat16)
    return header_of(f"sound-{uuid.uuid4().hex}", version, 1.0, LAYERS, layout)


def batch(samples: Sequence[pb.VerifierStates]) -> pb.StreamStatesRequest:
    """A message with random states for these samples in its payload."""
    rng, lm_head = np.random.default_rng(len(samples)), matrices()["lm_head.weight"]
    ids = torch.arange(DRAFT_VOCAB) + draft()["d2t"]
    payload = b""
    for message in samples:
        packed = message.packed
        layout = layout_of(packed.tokens, len(LAYERS), HIDDEN, torch.bfloat16)
        made = Sample(message, torch.zeros(layout.nbytes, dtype=torch.uint8))
        picked = torch.from_numpy(rng.integers(0, DRAFT_VOCAB, packed.tokens))
        made.token_ids.copy_(ids[picked])
        made.positions.copy_(torch.arange(packed.tokens))
        made.loss_mask[2:] = True
        for states in (made.aux, made.final_hidden):
            values = rng.standard_normal(tuple(states.shape), dtype=np.float32)
            states.copy_(torch.from_numpy(values))
        # What the trainer refuses otherwise: log-probs that are none of these states' logits.
        logits = made.final_hidden[:-1].float() @ lm_head.T
        chosen = picked[1:, None]
        made.sampled_logits[1:] = logits.gather(1, chosen)[:, 0]
        made.sampled_logprobs[1:] = logits.log_softmax(1).gather(1, chosen)[:, 0]
        packed.span.memory, packed.span.offset = pb.MEMORY_PAYLOAD, len(payload)
        packed.span.bytes = layout.nbytes
        packed.checksum = checksum_of(made.block.numpy())
        payload += made.block.numpy().tobytes()
    return pb.StreamStatesRequest(batch=pb.SampleBatch(samples=samples), payload=payload)


def header(session_id: str) -> pb.StreamStatesRequest:
    """The first message of a stream over gRPC."""
    given = pb.StreamHeader(session_id=session_id)
    return pb.StreamStatesRequest(header=given)


def draft() -> dict[str, torch.Tensor]:
    """The example's."""
    return dict(load_file(ARITHMETIC / "draft" / "model.safetensors"))


def stage(stage_id: str, tensors: dict[str, torch.Tensor]) -> list[rollout_pb.StageRequest]:
    """Header and chunks of a draft."""
    named = rollout_pb.StageHeader(
        stage_id=stage_id,
        kind=rollout_pb.STAGE_KIND_DRAFT,
        version=1,
        tensors=[spec_of(name, tensor) for name, tensor in sorted(tensors.items())],
    )
    chunks = [rollout_pb.StageRequest(chunk=chunk) for chunk in chunks_of(tensors)]
    return [rollout_pb.StageRequest(header=named), *chunks]
