"""The layout of a sample's tensors in one block, the same on every transport and in the trainer.

In this order, little-endian, T tokens, A auxiliary layers, H hidden size:

    int32   [3, T]        token ids, positions, segment ids
    float32 [2, T]        sampled log-probs, sampled logits
    uint8   [T]           loss mask, 0 or 1
    states  [T, A * H]    from the next multiple of 64 on
    states  [T, H]        from the next multiple of 64 on
    zeros                 to the next multiple of 64

One block has one checksum, is copied once, and needs no message for each tensor.

``Sample`` is a block and the ``VerifierStates`` header that describes it: the same class in the
bridge, on the wire, in the store and in the learner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from slipstream.errors import RefusedError
from slipstream.tensors import dtype_from_wire, dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb

ALIGNMENT = 64
STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that hidden states may have."""

TENSORS = (
    *("token_ids", "positions", "segment_ids", "loss_mask"),
    *("aux", "final_hidden", "sampled_logprobs", "sampled_logits"),
)
"""The tensors of a sample, by their names in ``Sample``."""


@dataclass(frozen=True)
class Layout:
    """The offsets of everything in a block.

    Attributes:
        tokens: T.
        aux_layers: A.
        hidden_size: H.
        dtype: of both states.
    """

    tokens: int
    aux_layers: int
    hidden_size: int
    dtype: torch.dtype

    @cached_property
    def mask_at(self) -> int:
        """First byte of the loss mask."""
        return 4 * self.tokens * 5

    @cached_property
    def aux_at(self) -> int:
        """First byte of the auxiliary states."""
        return _up(self.mask_at + self.tokens)

    @cached_property
    def final_at(self) -> int:
        """First byte of the final states."""
        width = self.aux_layers * self.hidden_size
        return _up(self.aux_at + self.tokens * width * self.dtype.itemsize)

    @cached_property
    def nbytes(self) -> int:
        """Size of the block in bytes."""
        return _up(self.final_at + self.tokens * self.hidden_size * self.dtype.itemsize)


@lru_cache(maxsize=4096)
def layout_of(tokens: int, aux_layers: int, hidden_size: int, dtype: torch.dtype) -> Layout:
    """The layout, made once for each shape."""
    return Layout(tokens, aux_layers, hidden_size, dtype)


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def header_of(
    sample_id: str,
    policy_version: int,
    temperature: float,
    aux_layers: Sequence[int],
    layout: Layout,
) -> pb.VerifierStates:
    """The header of a sample, without checksum and span."""
    return pb.VerifierStates(
        sample_id=sample_id,
        policy_version=policy_version,
        temperature=temperature,
        aux_layers=aux_layers,
        packed=pb.PackedStates(
            tokens=layout.tokens,
            hidden_size=layout.hidden_size,
            states_dtype=dtype_to_wire(layout.dtype),
        ),
    )


def layout_in(header: pb.VerifierStates) -> Layout:
    """The layout that a checked header describes."""
    packed = header.packed
    dtype = dtype_from_wire(packed.states_dtype, "packed.states_dtype")
    return layout_of(packed.tokens, len(header.aux_layers), packed.hidden_size, dtype)


@dataclass(frozen=True, eq=False)
class Sample:
    """The states of one sequence (or window, or pack) as the policy's own forward pass saw them.

    T tokens, A auxiliary layers, H hidden size. Tensors are views of the block, made when they
    are read, and shared: do not write to them.

    Attributes:
        header: id, policy version, temperature, layers and layout; see ``header_of``.
        block: uint8 [at least nbytes] on the CPU, laid out as the module says.
    """

    header: pb.VerifierStates
    block: torch.Tensor

    @classmethod
    def pack(
        cls,
        sample_id: str,
        policy_version: int,
        temperature: float,
        aux_layers: Sequence[int],
        *,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        loss_mask: torch.Tensor,
        aux: torch.Tensor,
        final_hidden: torch.Tensor,
        sampled_logprobs: torch.Tensor,
        sampled_logits: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Sample:
        """Make a sample in a block of its own, with copies of these tensors.

        Args:
            sample_id, policy_version, temperature, aux_layers: see ``header_of``.
            token_ids, positions, segment_ids: integers [T]; no segment ids: one segment.
            loss_mask: bool [T].
            aux: floating [T, A * H].
            final_hidden: floating [T, H].
            sampled_logprobs, sampled_logits: floating [T].
            dtype: of the states in the block; None keeps that of ``final_hidden``.

        Raises:
            RefusedError: a tensor of another shape.
        """
        tokens, hidden_size = final_hidden.shape
        layout = layout_of(tokens, len(aux_layers), hidden_size, dtype or final_hidden.dtype)
        header = header_of(sample_id, policy_version, temperature, aux_layers, layout)
        sample = cls(header, torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu"))
        given = {
            "token_ids": token_ids,
            "positions": positions,
            "loss_mask": loss_mask,
            "sampled_logprobs": sampled_logprobs,
            "sampled_logits": sampled_logits,
            "aux": aux,
            "final_hidden": final_hidden,
        }
        if segment_ids is not None:
            given["segment_ids"] = segment_ids
        for name, tensor in given.items():
            target = getattr(sample, name)
            if tensor.shape != target.shape:
                raise RefusedError(
                    name, list(tensor.shape), list(target.shape), "give every tensor the same T"
                )
            target.copy_(tensor)
        return sample

    def repacked(self, **changes: Any) -> Sample:
        """Return a copy with some arguments of ``pack`` changed."""
        arguments: dict[str, Any] = {
            "sample_id": self.sample_id,
            "policy_version": self.policy_version,
            "temperature": self.temperature,
            "aux_layers": tuple(self.header.aux_layers),
        }
        arguments |= {name: getattr(self, name) for name in TENSORS}
        made = Sample.pack(**(arguments | changes))
        made.header.sampling.CopyFrom(self.header.sampling)
        made.header.logits_dtype = self.header.logits_dtype
        made.header.prompt = self.header.prompt
        if self.header.HasField("rollout_policy_version"):
            made.header.rollout_policy_version = self.header.rollout_policy_version
        return made

    @property
    def sample_id(self) -> str:
        return self.header.sample_id

    @property
    def policy_version(self) -> int:
        """The policy version whose forward pass made the states."""
        return self.header.policy_version

    @property
    def temperature(self) -> float:
        """Sampling temperature of the rollout, > 0; the teacher's temperature."""
        return self.header.temperature

    @property
    def sampling(self) -> pb.SamplingParameters:
        """The sampling parameters of the rollout, beside ``temperature``; empty: none."""
        return self.header.sampling

    @property
    def on_policy(self) -> bool:
        """True if the policy version that made the states also sampled the tokens."""
        header = self.header
        known = header.HasField("rollout_policy_version")
        return not known or header.rollout_policy_version == header.policy_version

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of the policy's own logits; see ``slipstream.sampling``."""
        wire = self.header.logits_dtype
        return dtype_from_wire(wire, "logits_dtype") if wire else torch.float32

    @cached_property
    def layout(self) -> Layout:
        """The offsets of everything in the block."""
        return layout_in(self.header)

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return self.header.packed.tokens

    @property
    def nbytes(self) -> int:
        """Size of the block in bytes."""
        return self.layout.nbytes

    @property
    def token_ids(self) -> torch.Tensor:
        """int32 [T]: x_0 .. x_{T-1}."""
        return self._integers[0]

    @property
    def positions(self) -> torch.Tensor:
        """int32 [T]: position of each token in its own sequence."""
        return self._integers[1]

    @property
    def segment_ids(self) -> torch.Tensor:
        """int32 [T]: one number per packed sequence, in one run each."""
        return self._integers[2]

    @cached_property
    def loss_mask(self) -> torch.Tensor:
        """bool [T]: true where the token is a completion token."""
        at = self.layout.mask_at
        return self.block[at : at + self.tokens].view(torch.bool)

    @property
    def sampled_logprobs(self) -> torch.Tensor:
        """float32 [T]: log p(x_t | x_<t) at ``temperature``."""
        return self._floats[0]

    @property
    def sampled_logits(self) -> torch.Tensor:
        """float32 [T]: logit of x_t given x_<t, before temperature."""
        return self._floats[1]

    @cached_property
    def aux(self) -> torch.Tensor:
        """[T, A * H]: auxiliary hidden states, concatenated in the run's layer order."""
        layout = self.layout
        width = layout.aux_layers * layout.hidden_size
        return self._states(layout.aux_at, width)

    @cached_property
    def final_hidden(self) -> torch.Tensor:
        """[T, H]: after the final norm, the input of lm_head."""
        return self._states(self.layout.final_at, self.layout.hidden_size)

    def clear_padding(self) -> None:
        """Write zeros where the block holds nothing."""
        layout, mask_end = self.layout, self.layout.mask_at + self.tokens
        width = layout.hidden_size * layout.dtype.itemsize * self.tokens
        self.block[mask_end : layout.aux_at] = 0
        self.block[layout.aux_at + layout.aux_layers * width : layout.final_at] = 0
        self.block[layout.final_at + width : layout.nbytes] = 0

    @cached_property
    def group(self) -> str:
        """The id that the samples of one prompt share, in hexadecimal digits.

        GRPO draws many completions of one prompt. A head that has trained on some of them knows
        the others, so they are held out together and are not independent evidence. Where the
        header does not name the prompt, it is taken to be the tokens before the first one in the
        loss mask, and a window that begins inside a completion is a group of its own.
        """
        if self.header.prompt:
            return self.header.prompt.hex()
        length = int(self.loss_mask.int().argmax())
        return prompt_hash(self.token_ids[:length]).hex() if length else self.sample_id

    @property
    def completion(self) -> str:
        """The name that the windows of one completion share: their ids end in "+" and an offset."""
        return self.sample_id.partition("+")[0]

    @cached_property
    def _integers(self) -> torch.Tensor:
        return self.block[: 12 * self.tokens].view(torch.int32).view(3, self.tokens)

    @cached_property
    def _floats(self) -> torch.Tensor:
        span = self.block[12 * self.tokens : self.layout.mask_at]
        return span.view(torch.float32).view(2, self.tokens)

    def _states(self, at: int, width: int) -> torch.Tensor:
        nbytes = self.tokens * width * self.layout.dtype.itemsize
        return self.block[at : at + nbytes].view(self.layout.dtype).view(self.tokens, width)


def window_id(completion: str, offset: int) -> str:
    """Name the window that begins at a token of a completion; see ``Sample.completion``."""
    return f"{completion}+{offset}" if offset else completion


def prompt_hash(token_ids: torch.Tensor) -> bytes:
    """The hash that identifies a prompt, 16 bytes; integers [n] on the CPU."""
    return hashlib.blake2b(token_ids.long().numpy().tobytes(), digest_size=16).digest()


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether samples of this prompt or completion are held out: its hash is below
    ``fraction``.

    It follows from the name alone, so a restart, a second trainer or a replayed stream never
    moves a sample from the held-out share into training.
    """
    word = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") < fraction * 2.0**64
