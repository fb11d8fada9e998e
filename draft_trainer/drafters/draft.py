"""The interface of a draft mechanism to the rest of the trainer.

Store, learner, gate, registry and server use only what is declared here. A mechanism is a
``DraftShape`` (its configuration), a ``Draft`` (the module that is trained) and a ``Drafter``,
which reads and writes their checkpoints.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.block import BlockShape
from draft_trainer.drafters.policy import PolicyHead
from slipstream.checkpoints import (
    CONFIG_FILE,
    VOCABULARY_MAPS,
    WEIGHTS_FILE,
    check_maps,
    d2t_of,
    read_layout,
    reading_config,
    t2d_of,
    target_ids,
    weight_files,
    write_checkpoint,
)
from slipstream.errors import RefusedError, StatusCode
from slipstream.hub import read_json


@dataclass(frozen=True, kw_only=True)
class DraftShape(ABC):
    """A draft's configuration, as far as the trainer reads it.

    Attributes:
        aux_layer_ids: auxiliary hidden states it takes, "after L decoder layers", ascending; empty
            where the final state is all that it needs.
        target_hidden_size: width H of the policy, and of one auxiliary or final state.
        vocab_size: of the policy.
        draft_vocab_size: tokens that the draft can propose.
    """

    aux_layer_ids: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int

    @property
    def full_vocabulary(self) -> bool:
        """True if draft ids are target ids."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def max_row_tokens(self) -> int | None:
        """The longest row it can be unrolled on, TTT steps included; None for any."""
        return None

    @property
    def plain_logits(self) -> bool:
        """True if its logits are the plain product with the lm_head: no bias, scale or cap."""
        return False

    @property
    def bounds(self) -> frozenset[str]:
        """Fields that bound the input and do not change the function."""
        return frozenset()

    @abstractmethod
    def to_dict(self, dtype_name: str = "bfloat16") -> dict[str, Any]:
        """The ``config.json`` that vLLM loads, for weights of this element type."""


class Draft(nn.Module, ABC):
    """The trainable part of a draft; ``state_dict`` has the checkpoint's names.

    Attributes:
        kind: the ``Drafter.name`` of its mechanism.
        config: its shape.
        lm_head: maps ``normed`` outputs to draft-vocabulary logits; None: the policy's, which
            follows its version and is not trained.
        confidence: predicts the logit of a step's acceptance rate from its ``normed`` output, or
            from the first columns of it; None in most mechanisms.
        frozen: the first columns of ``lm_head_rows`` that are the policy's, beside trained ones.

    Args:
        draft_vocab_ids: int [draft_vocab], the target id of every draft id; None for the full
            vocabulary, which most mechanisms only have, and where acceptance is never computed.
    """

    kind: ClassVar[str]
    config: DraftShape
    lm_head: nn.Linear | None
    confidence: nn.Linear | None = None
    frozen: int = 0
    draft_vocab_ids: Tensor | None

    def __init__(self, draft_vocab_ids: Tensor | None = None) -> None:
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
            ``steps`` tensors [B, T - first_anchor, size]; at the anchor i, step s predicts
            x_{i+2+s}. Entries whose input token lies past the row's end have no meaning, and no
            meaningful entry depends on them.

        Raises:
            RefusedError: the rows are longer than ``config.max_row_tokens``.
        """

    @abstractmethod
    def normed(self, output: Tensor) -> Tensor:
        """The factor of ``lm_head_rows``, [..., size], from an output of ``unroll``."""

    def forward(
        self, batch: Batch, steps: int, first_anchor: int = 0
    ) -> tuple[list[Tensor], Tensor]:
        """Return the ``normed`` outputs of ``unroll`` and the lm_head's weight, for the loss."""
        outputs = [self.normed(output) for output in self.unroll(batch, steps, first_anchor)]
        return outputs, self.lm_head_rows(batch.policy).to(outputs[0].dtype)

    def lm_head_rows(self, policy: PolicyHead | None) -> Tensor:
        """[draft_vocab, size]: the lm_head's weight, the draft's own or this policy version's."""
        if self.lm_head is not None:
            return self.lm_head.weight
        assert policy is not None, "a draft without an lm_head, and no policy version"
        return policy.lm_head_rows

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    def target_ids(self) -> Tensor:
        """int64 [draft_vocab]: the target id of every draft id.

        Raises:
            RefusedError: the vocabulary is reduced and the draft was built without its ids.
        """
        if self.draft_vocab_ids is not None:
            return self.draft_vocab_ids.long()
        config = self.config
        if not config.full_vocabulary:
            raise RefusedError(
                "draft_vocab_ids", "nothing", f"{config.draft_vocab_size} ids", "use Drafter.read"
            )
        return torch.arange(config.vocab_size, device=self.device)

    def draft_ids_of(self, token_ids: Tensor) -> Tensor:
        """Draft ids of target ids (int64, any shape), -1 outside the draft vocabulary."""
        ids = torch.full((self.config.vocab_size,), -1, device=token_ids.device)
        ids[self.target_ids()] = torch.arange(self.config.draft_vocab_size, device=token_ids.device)
        return ids[token_ids]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint as it was read, or as it is to be written.

    Attributes:
        module: makes a draft of a shape, and of draft-vocabulary ids where there are any.
        config: the draft's shape.
        tensors: parameters by the draft's own names, in the types that they are stored in; without
            copies of the policy's, which vLLM shares with it and which are never staged.
        d2t: int64 [draft_vocab] offsets from draft to target ids; None for the full vocabulary.
        document: the config.json in which vLLM reads ``config``.
        names: on disk, by the draft's own name.
        with_t2d: whether t2d is stored beside d2t.
        as_stored: whether vLLM can load the folder that it was read from as it is.
        assumed: settings that neither its config.json nor its tensors say, "name = value" each.
    """

    module: Callable[..., Draft]
    config: DraftShape
    tensors: dict[str, Tensor]
    d2t: Tensor | None
    document: dict[str, Any]
    names: Mapping[str, str]
    with_t2d: bool
    as_stored: bool
    assumed: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """A line for people on what was assumed; empty if nothing was."""
        given = "; ".join(self.assumed)
        return given and f"assumed, as its config.json does not say (add what is right): {given}"

    def draft(self) -> Draft:
        """The draft in float32."""
        ids = () if self.d2t is None else (target_ids(self.d2t),)
        # Initial values would be drawn from torch's global generator, which belongs to the policy's
        # training where both share a process.
        with torch.device("meta"):
            draft = self.module(self.config, *ids)
        draft.load_state_dict(
            {
                name: torch.empty(tensor.shape, dtype=torch.float32, device="cpu").copy_(tensor)
                for name, tensor in self.tensors.items()
            },
            assign=True,
        )
        return draft

    def draft_like(self, other: Checkpoint) -> Draft:
        """The draft in float32, frozen, for a fleet whose drafts are like ``other``.

        Servers copy a release into the draft that they run, and the gate compares by the policy's
        rows of one draft vocabulary, so both must be the same.

        Raises:
            RefusedError: shape or vocabulary differ (FAILED_PRECONDITION).
        """
        found, wanted = self.config, other.config
        assert type(found) is type(wanted), "drafts of two mechanisms"
        names = [
            name
            for name in (field.name for field in fields(wanted))
            if name not in found.bounds and getattr(found, name) != getattr(wanted, name)
        ]
        theirs, differ = other.d2t, 0
        if not names and self.d2t is not None and theirs is not None:
            differ = int((self.d2t != theirs).sum())
        if names or differ:
            raise RefusedError(
                f"the draft's {', '.join(names) or 'draft vocabulary'}",
                ", ".join(f"{name} {getattr(found, name)}" for name in names)
                or f"{differ} of {wanted.draft_vocab_size} tokens differ",
                (", ".join(f"{name} {getattr(wanted, name)}" for name in names) or "the same ones")
                + ", as in this registry's drafts",
                "a fleet swaps drafts of one shape and vocabulary: train it like release 0, or "
                "begin a new registry with it (draft.initial) and start the servers with it",
                StatusCode.FAILED_PRECONDITION,
            )
        return replace(self, config=wanted).draft().requires_grad_(False)

    def written(self) -> tuple[str, dict[str, Tensor]]:
        """Return what ``write`` writes: config.json's text and model.safetensors' tensors."""
        stored = {
            self.names[name]: tensor.contiguous().clone() for name, tensor in self.tensors.items()
        }
        if self.d2t is not None:
            stored["d2t"] = self.d2t.long()
            if self.with_t2d:
                stored["t2d"] = t2d_of(self.d2t, self.config.vocab_size)
        return json.dumps(self.document, indent=2) + "\n", stored

    def write(self, directory: Path) -> None:
        """Write config.json and model.safetensors into an existing directory."""
        write_checkpoint(directory, *self.written())


class Drafter(ABC):
    """One mechanism's checkpoints.

    Attributes:
        name: ``[draft] kind``, and ``speculative_config["method"]`` of vLLM.
    """

    name: ClassVar[str]

    @abstractmethod
    def build(self, document: Mapping[str, Any]) -> Draft:
        """An untrained draft, from what ``DraftShape.to_dict`` returned."""

    @abstractmethod
    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """Read and check a checkpoint of any layout. Nothing is written.

        Args:
            directory: the checkpoint.
            policy: the policy's folder, where the checkpoint does not say everything.

        Raises:
            RefusedError: unreadable, incomplete, contradictory, or not a draft for the policy.
        """

    @abstractmethod
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


@dataclass(frozen=True, kw_only=True)
class StoredShape(DraftShape):
    """A shape that keeps the config.json that it was read from.

    Attributes:
        block: every one of its decoder layers.
        document: the config.json.
    """

    block: BlockShape
    document: Mapping[str, Any]

    @property
    def bounds(self) -> frozenset[str]:
        """The config.json: what it says beyond the shape's fields does not change the function."""
        return frozenset(("document",))

    def to_dict(self, dtype_name: str = "bfloat16") -> dict[str, Any]:
        """Its config.json; vLLM gives the draft the element type of the policy."""
        return dict(self.document)


class OneLayout(Drafter):
    """A mechanism whose checkpoints have one layout; their shape is a ``StoredShape``.

    Attributes:
        module: class of its drafts.
        shape: class of their shapes; ``from_dict`` reads a config.json.
        advice: next step where a checkpoint cannot be read.
    """

    module: ClassVar[type[Any]]
    shape: ClassVar[type[Any]]
    advice: ClassVar[str]

    def build(self, document: Mapping[str, Any]) -> Draft:
        """See ``Drafter.build``."""
        return self.module(self.shape.from_dict(document))  # type: ignore[no-any-return]

    def stored_name(self, config: DraftShape, name: str) -> str:
        """Return the name in a checkpoint of a tensor of the module."""
        return name

    def shape_of(self, directory: Path, document: Mapping[str, Any]) -> Any:
        """The shape in a config.json. Raises RefusedError: one that is not represented."""
        with reading_config(directory, self.advice):
            return self.shape.from_dict(document)

    def checkpoint(
        self,
        directory: Path,
        config: DraftShape,
        stored: Mapping[str, Tensor],
        document: dict[str, Any],
        unchanged: bool = True,
    ) -> Checkpoint:
        """Check the tensors that were read and return the checkpoint.

        Args:
            directory: the checkpoint's.
            config: from ``shape_of``.
            stored: tensors by their names there, without the policy's; d2t and t2d too.
            document: the config.json in which vLLM reads ``config``; ``unchanged`` where it is
                that of the directory.

        Raises:
            RefusedError: other tensors than the shape asks for.
        """
        with reading_config(directory, self.advice):
            wanted = tensor_shapes(lambda: self.module(config))
        names = {name: self.stored_name(config, name) for name in wanted}
        shapes = {names[name]: shape for name, shape in wanted.items()}
        maps = {name: stored[name] for name in VOCABULARY_MAPS if name in stored}
        own = {name: tensor for name, tensor in stored.items() if name not in maps}
        check_tensors(own, shapes, str(directory), self.advice)
        d2t, sizes = maps.get("d2t"), (config.draft_vocab_size, config.vocab_size)
        check_maps(d2t, maps.get("t2d"), *sizes, str(directory))
        if config.full_vocabulary:
            # vLLM has no parameters for the maps, not even for maps that change nothing.
            d2t, maps = None, {}
        one_file = weight_files(directory) == [directory / WEIGHTS_FILE]
        return Checkpoint(
            module=self.module,
            config=config,
            tensors={name: stored[names[name]] for name in names},
            d2t=None if d2t is None else d2t.long(),
            document=document,
            names=names,
            with_t2d="t2d" in maps,
            as_stored=unchanged
            and one_file
            and read_layout(directory).keys() == shapes.keys() | maps.keys(),
        )

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
        """See ``Drafter.save``."""
        assert isinstance(draft, self.module), "a draft of another mechanism"
        if layout != "plain":
            raise RefusedError("layout", layout, "plain", "leave it out: there is no other")
        config = draft.config
        document = config.to_dict() if like is None else read_json(like / CONFIG_FILE, self.advice)
        trained = dict(draft.named_parameters())
        tensors = {
            # Untrained tensors keep their type: rounding could change what a router chooses.
            name: t.detach().to("cpu", dtype if name in trained else t.dtype)
            for name, t in draft.state_dict().items()
        }
        names = {name: self.stored_name(config, name) for name in tensors}
        d2t = None if config.full_vocabulary else d2t_of(draft.target_ids().cpu())
        with_t2d = like is None or "t2d" in read_layout(like)
        Checkpoint(
            *(self.module, config, tensors, d2t, document, names), with_t2d, as_stored=True
        ).write(directory)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, torch.Size], where: str, next_step: str
) -> None:
    """Raise RefusedError unless these are the wanted ones: names, shapes, finite floats."""
    if tensors.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted)
        raise RefusedError(where, f"missing {missing}, unknown {extra}", sorted(wanted), next_step)
    for name, tensor in tensors.items():
        found: object
        expected: object
        if tensor.shape != wanted[name]:
            found, expected = list(tensor.shape), list(wanted[name])
        elif tensor.dtype not in _FLOATS:
            found, expected = tensor.dtype, f"one of {[*map(str, _FLOATS)]}"
        elif wrong := int((~torch.isfinite(tensor)).sum()):
            found, expected = f"{wrong} values not finite", "finite numbers"
        else:
            continue
        raise RefusedError(f"{where}: {name}", found, expected, next_step)


def check_fits(found: Mapping[str, object], policy: Mapping[str, Any], next_step: str) -> None:
    """Raise RefusedError where a draft's sizes, by their names, are not those of this policy."""
    for name, value in found.items():
        if value != policy.get(name):
            expected = f"{policy.get(name)}, for this policy"
            raise RefusedError(f"the draft's {name}", value, expected, next_step)


def tensor_shapes(build: Callable[[], nn.Module]) -> dict[str, torch.Size]:
    """Return the shapes of a module's tensors by name, without allocating them."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in build().state_dict().items()}
