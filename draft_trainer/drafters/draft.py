"""What every draft mechanism offers to the rest of the trainer.

Store, learner, gate, registry and server use only what is declared here; EAGLE-3 is the one
implementation so far. A mechanism is a ``Drafter``, which reads and writes checkpoints, and a
``Draft``, the module that is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from draft_trainer.drafters.batch import Batch
from slipstream.errors import RefusedError


class DraftShape(Protocol):
    """A draft's configuration, a frozen dataclass, as far as the trainer reads it.

    Attributes:
        aux_layer_ids: auxiliary hidden states it takes, "after L decoder layers", ascending.
        target_hidden_size: width H of the policy, and of one auxiliary or final state.
        vocab_size: of the policy.
        draft_vocab_size: rows of the draft's lm_head.
        max_row_tokens: longest row it can be unrolled on, TTT steps included; None for any.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def max_row_tokens(self) -> int | None: ...
    def to_dict(self, dtype_name: str = "bfloat16") -> dict[str, Any]:
        """The ``config.json`` that vLLM loads."""


class Draft(nn.Module, ABC):
    """The trainable part of a draft; ``state_dict`` has the checkpoint's names.

    Attributes:
        kind: the ``Drafter.name`` of its mechanism.
        config: its shape.
        lm_head: from ``normed`` outputs to draft-vocabulary logits.

    Args:
        draft_vocab_ids: int [draft_vocab], the target id of every draft id; None for the full
            vocabulary, and where acceptance is never asked for.
    """

    kind: ClassVar[str]
    config: DraftShape
    lm_head: nn.Linear
    draft_vocab_ids: Tensor | None

    def __init__(self, draft_vocab_ids: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("draft_vocab_ids", draft_vocab_ids, persistent=False)

    @abstractmethod
    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """Run the draft ``steps`` positions ahead from every anchor.

        Args:
            batch: rows; none of its tensors gets a gradient.
            steps: K, at least 1.
            first_anchor: positions before it are context only.

        Yields:
            ``steps`` tensors [B, T - first_anchor, H]; at the anchor i, step s predicts
            x_{i+2+s}. Entries whose input token lies past the row's end have no meaning, and no
            meaningful entry depends on them.

        Raises:
            RefusedError: the rows are longer than ``config.max_row_tokens``.
        """

    @abstractmethod
    def normed(self, output: Tensor) -> Tensor:
        """The input of ``lm_head``, [..., H], from an output of ``unroll``."""

    def logits(self, output: Tensor) -> Tensor:
        """Draft-vocabulary logits [..., draft_vocab] of an output of ``unroll``."""
        return self.lm_head(self.normed(output))

    def target_ids(self) -> Tensor:
        """int64 [draft_vocab]: the target id of every draft id.

        Raises:
            RefusedError: the vocabulary is reduced and the draft was built without its ids.
        """
        if self.draft_vocab_ids is not None:
            return self.draft_vocab_ids.long()
        config = self.config
        if config.draft_vocab_size < config.vocab_size:
            raise RefusedError(
                "draft_vocab_ids", "nothing", f"{config.draft_vocab_size} ids", "use Drafter.read"
            )
        return torch.arange(config.vocab_size, device=self.lm_head.weight.device)

    def draft_ids_of(self, token_ids: Tensor) -> Tensor:
        """Draft ids of target ids (int64, any shape), -1 outside the draft vocabulary."""
        ids = torch.full((self.config.vocab_size,), -1, device=token_ids.device)
        ids[self.target_ids()] = torch.arange(self.config.draft_vocab_size, device=token_ids.device)
        return ids[token_ids]


class DraftCheckpoint(Protocol):
    """A checkpoint as it was read.

    Attributes:
        config: the draft's.
        tensors: parameters by the draft's own names, in the types that they are stored in; without
            copies of the policy's, which vLLM shares with it and which are never staged.
        d2t: int64 [draft_vocab] offsets from draft to target ids; None for the full vocabulary.
        as_stored: whether vLLM can load the folder that it was read from as it is.
    """

    @property
    def config(self) -> DraftShape: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...
    @property
    def d2t(self) -> Tensor | None: ...
    @property
    def as_stored(self) -> bool: ...

    def draft(self) -> Draft:
        """The draft in float32."""

    def draft_like(self, other: DraftCheckpoint) -> Draft:
        """The draft in float32, frozen, for a fleet whose drafts are like ``other``.

        Servers copy a release into the draft that they run, and the gate compares by the policy's
        rows of one draft vocabulary, so both must be the same.

        Raises:
            RefusedError: shape or vocabulary differ (FAILED_PRECONDITION).
        """

    def write(self, directory: Path) -> None:
        """Write it into an existing directory, in the layout that it was read in if vLLM can."""


class Drafter(Protocol):
    """One mechanism: its name and its checkpoints."""

    @property
    def name(self) -> str:
        """``[draft] kind``, and ``speculative_config["method"]`` of vLLM."""

    def build(self, document: Mapping[str, Any]) -> Draft:
        """An untrained draft, from what ``DraftShape.to_dict`` returned."""

    def read(self, directory: Path, policy: Path | None = None) -> DraftCheckpoint:
        """Read and check a checkpoint of any layout.

        Args:
            directory: the checkpoint.
            policy: the policy's folder, where the checkpoint does not say everything.

        Raises:
            RefusedError: unreadable, incomplete, contradictory, or not a draft for the policy.
        """

    def save(
        self,
        directory: Path,
        draft: Draft,
        dtype: torch.dtype = torch.bfloat16,
        *,
        layout: str = "plain",
        policy: Path | None = None,
        like: Path | None = None,
    ) -> None:
        """Write a checkpoint into an existing directory; the same weights give the same bytes.

        Args:
            directory: where.
            draft: the weights, any floating type.
            dtype: element type to write.
            layout: one that vLLM serves; ignored with ``like``.
            policy: folder of the policy, for layouts that name it; ignored with ``like``.
            like: a checkpoint whose layout, fields and names are kept.

        Raises:
            RefusedError: the layout cannot represent the draft, or ``like`` is of another shape.
        """
