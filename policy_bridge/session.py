"""What the trainer answered to OpenRun, checked against the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from policy_bridge.modules import PolicyModules
from slipstream.channel import MAX_MESSAGE_BYTES
from slipstream.layers import decode_layers
from slipstream.refusal import RefusedError
from slipstream.schema import check_schema
from slipstream.tensors import decode
from slipstream.v1 import draft_trainer_pb2 as pb

# Room in a message for everything that is not a state: ids, shapes, checksums.
_MESSAGE_OVERHEAD = 64 << 10


@dataclass(frozen=True)
class Session:
    """An open run.

    Attributes:
        session_id: goes with every later call.
        aux_layers: "after L layers" numbers to capture, ascending.
        draft_vocab_ids: int64 [draft_vocab], rows of lm_head to announce.
        max_tokens: longest sample the trainer takes.
        latest_policy_version: the highest it knows; None if none.
        rollout_servers: host:port of each server that it publishes to.
        checksums: that the trainer can verify.
        shared_memory: its ring for this session, or why there is none.
    """

    session_id: str
    aux_layers: tuple[int, ...]
    draft_vocab_ids: torch.Tensor
    max_tokens: int
    latest_policy_version: int | None
    rollout_servers: tuple[str, ...]
    checksums: tuple[int, ...] = (pb.CHECKSUM_KIND_CRC32,)
    shared_memory: pb.SharedMemory = field(default_factory=pb.SharedMemory)

    def same_shape(self, other: Session) -> bool:
        """Whether states captured for one session fit the other."""
        return self.aux_layers == other.aux_layers and torch.equal(
            self.draft_vocab_ids, other.draft_vocab_ids
        )

    def max_sample_tokens(self, token_bytes: int) -> int:
        """Tokens that fit both the trainer's limit and one gRPC message."""
        return min(self.max_tokens, (MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD) // token_bytes)


def decode_session(response: pb.OpenRunResponse, policy: PolicyModules) -> Session:
    """A checked ``Session``.

    Raises:
        RefusedError: another schema version, layers the policy does not have, vocabulary ids
            out of range or not ascending, or no room for a sample.
    """
    check_schema(
        response.schema_version,
        "the trainer's",
        "install the same release of slipstream in the policy's image and in the trainer's",
    )
    layers = decode_layers(response.aux_layers, "aux_layers")
    # The residual stream after the last layer is not the input of any layer, and
    # Hugging Face's hidden_states[n] is not it either: that one is normed.
    if layers[-1] >= len(policy.layers):
        raise RefusedError(
            "aux_layers.ids",
            list(layers),
            f"each below the policy's {len(policy.layers)} decoder layers",
            "start the trainer with a draft made for this policy",
        )
    ids = decode(response.draft_vocab_ids, "draft_vocab_ids")
    if ids.dtype != torch.int32 or ids.dim() != 1 or not len(ids):
        raise RefusedError(
            "draft_vocab_ids",
            f"{ids.dtype} {list(ids.shape)}",
            "int32 [draft_vocab]",
            "use a trainer that speaks slipstream.v1",
        )
    values = ids.tolist()
    ascending = all(a < b for a, b in pairwise(values))
    if not ascending or values[0] < 0 or values[-1] >= policy.vocab_size:
        raise RefusedError(
            "draft_vocab_ids",
            f"{values[0]} to {values[-1]}, ascending: {ascending}",
            f"ascending ids below the policy's vocabulary of {policy.vocab_size}",
            "start the trainer with a draft made for this policy",
        )
    if response.max_tokens_per_sample < 2:
        raise RefusedError(
            "max_tokens_per_sample",
            response.max_tokens_per_sample,
            "at least 2",
            "raise the trainer's limit",
        )
    known = response.HasField("latest_policy_version")
    return Session(
        session_id=response.session_id,
        aux_layers=layers,
        draft_vocab_ids=ids.long(),
        max_tokens=response.max_tokens_per_sample,
        latest_policy_version=response.latest_policy_version if known else None,
        rollout_servers=tuple(response.rollout_servers),
        checksums=(*response.checksums, pb.CHECKSUM_KIND_CRC32),
        shared_memory=response.shared_memory,
    )
