"""A checkpoint that somebody else trained, held to what this registry's drafts are."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from draft_trainer.checkpoints.checkpoint import Checkpoint, read_checkpoint, target_ids
from draft_trainer.checkpoints.tensor_files import pickles
from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.eagle3.head_config import HeadConfig
from draft_trainer.releases.registry import Registry
from slipstream.refusal import RefusedError, StatusCode
from slipstream.v1 import release_pb2


def read_foreign(directory: Path, policy: Path | None = None) -> Checkpoint:
    """Read a checkpoint in any layout, as something to be released.

    Args:
        directory: the checkpoint.
        policy: the folder of its policy, where the checkpoint does not say everything.

    Raises:
        RefusedError: a pickle is in it, or ``read_checkpoint`` refuses it.
    """
    for name in pickles(directory):
        raise RefusedError(
            str(directory / name),
            "a pickle",
            "a checkpoint of safetensors alone",
            "pickles run code: give a folder with config.json and the safetensors only",
        )
    return read_checkpoint(directory, policy)


def foreign_head(checkpoint: Checkpoint, config: HeadConfig, d2t: Tensor | None) -> Eagle3Head:
    """The head of a checkpoint, float32, as one of a registry whose drafts are of ``config``.

    Servers copy a release into the draft that they run, and the gate compares by the policy's rows
    of one draft vocabulary, so both must be the same.

    Args:
        checkpoint: from ``read_foreign``.
        config: of the registry's drafts.
        d2t: int64 [draft_vocab], theirs; None for the full vocabulary.

    Raises:
        RefusedError: FAILED_PRECONDITION, with what differs.
    """
    found = checkpoint.config
    if found.rope_scaling is None:
        # A bound on lengths that the served draft keeps its own of; computes nothing.
        found = replace(found, max_position_embeddings=config.max_position_embeddings)
    names = [f.name for f in fields(config) if getattr(found, f.name) != getattr(config, f.name)]
    if names:
        raise _not_ours(
            ", ".join(names),
            ", ".join(f"{name} {getattr(found, name)}" for name in names),
            ", ".join(f"{name} {getattr(config, name)}" for name in names),
        )
    if d2t is not None and checkpoint.d2t is not None and not torch.equal(checkpoint.d2t, d2t):
        differ = int((target_ids(checkpoint.d2t) != target_ids(d2t)).sum())
        raise _not_ours("draft vocabulary", f"{differ} other tokens of {len(d2t)}", "the same ones")
    head = Eagle3Head(config, None if d2t is None else target_ids(d2t))
    head.load_state_dict({name: tensor.float() for name, tensor in checkpoint.tensors.items()})
    return head.requires_grad_(False)


def release_foreign(
    registry: Registry,
    checkpoint: Checkpoint,
    head: Eagle3Head,
    origin: str,
    *,
    run_id: str = "",
    gate: release_pb2.GateFigures | None = None,
) -> release_pb2.ReleaseManifest:
    """Write an imported draft as a release, which is not promoted by that.

    Args:
        registry: where.
        checkpoint: from ``read_foreign``.
        head: from ``foreign_head``.
        origin: the folder it was in, for people.
        run_id: of the run whose states it was gated on; empty where it was not gated.
        gate: its figures, if it was.

    Raises:
        RefusedError: another process writes the registry.
        OSError: the disk is full, or the folder cannot be written.
    """
    return registry.create(
        head,
        head.config,
        checkpoint.d2t,
        parent=None,
        trained_against=None,
        run_id=run_id,
        ttt_steps=0,
        gate=gate,
        dtype=checkpoint.tensors["fc.weight"].dtype,
        source=release_pb2.RELEASE_SOURCE_IMPORTED,
        draft_sample_method="" if gate is None else gate.draft_sample_method,
        num_speculative_tokens=0 if gate is None else gate.num_speculative_tokens,
        origin=origin,
    )


def _not_ours(field: str, found: str, expected: str) -> RefusedError:
    return RefusedError(
        f"the draft's {field}",
        found,
        f"{expected}, as in this registry's drafts",
        "a fleet swaps drafts of one shape and vocabulary: train it like release 0, or begin a new "
        "registry with it (draft.initial) and start the servers with it",
        StatusCode.FAILED_PRECONDITION,
    )
