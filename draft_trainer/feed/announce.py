"""Takes a policy version's matrices off the wire, or finds those it holds by their hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from draft_trainer.eagle3.head_config import HeadConfig
from draft_trainer.eagle3.policy_head import PolicyHead
from draft_trainer.feed.session import Run
from draft_trainer.feed.validate import STATE_DTYPES
from slipstream.refusal import RefusedError, StatusCode
from slipstream.tensors import ChunkAssembler, dtype_from_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2

LM_HEAD = "lm_head.weight"
EMBED_TOKENS = "embed_tokens.weight"

# SQLite's integers.
_MOST_VERSION = (1 << 63) - 1


def announce(
    run: Run,
    draft: HeadConfig,
    header: pb.AnnouncePolicyHeader,
    chunks: Iterable[tensor_pb2.TensorChunk],
) -> None:
    """Make a policy version known to ``run``; nothing of it is known if anything is wrong.

    A known version may be announced again with the same content, which changes nothing:
    a retry after a lost answer, or another rank of the same policy, maybe a version late.

    Raises:
        RefusedError: wrong names, shapes, dtypes or hashes, values that are not finite, a
            tensor that is neither sent nor held, or a version that is not new.
    """
    if header.policy_version > _MOST_VERSION:
        raise RefusedError(
            "policy_version", header.policy_version, f"at most {_MOST_VERSION}", "count up from 0"
        )
    specs = _checked(header.tensors, draft)
    latest, version = run.latest_policy_version, header.policy_version
    if _is_known(run, version, specs):
        return
    if latest is not None and version <= latest:
        # Before the tensors are received, which may be a gigabyte.
        raise RefusedError(
            "policy_version",
            version,
            f"higher than {latest}",
            "number policy versions in ascending order; a new run starts again at 0",
            StatusCode.FAILED_PRECONDITION,
        )
    tensors = _receive(run, specs, chunks)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise RefusedError(
                name,
                "values that are not finite",
                "finite values",
                "do not sync this policy version: its training step diverged",
            )
    try:
        run.add_policy(PolicyHead(version, tensors[LM_HEAD], tensors[EMBED_TOKENS]))
    except RefusedError:
        # Two ranks announced it at once, and this one came second.
        if not _is_known(run, version, specs):
            raise


def _checked(
    specs: Sequence[tensor_pb2.TensorSpec], draft: HeadConfig
) -> dict[str, tensor_pb2.TensorSpec]:
    shapes = {
        LM_HEAD: [draft.draft_vocab_size, draft.target_hidden_size],
        EMBED_TOKENS: [draft.vocab_size, draft.target_hidden_size],
    }
    # Not all of them: a header of a few megabytes has millions.
    names = [spec.name for spec in specs[:8]]
    if sorted(names) != sorted(shapes):
        raise RefusedError(
            "tensors",
            names,
            sorted(shapes),
            "announce both matrices, each of them once",
        )
    for spec in specs:
        if list(spec.shape) != shapes[spec.name]:
            raise RefusedError(
                f"{spec.name}.shape",
                list(spec.shape),
                shapes[spec.name],
                "send the lm_head rows of OpenRunResponse.draft_vocab_ids and all embeddings",
            )
        dtype = dtype_from_wire(spec.dtype, spec.name)
        if dtype not in STATE_DTYPES:
            raise RefusedError(
                f"{spec.name}.dtype",
                dtype,
                f"one of {', '.join(map(str, STATE_DTYPES))}",
                "send the policy's weights",
            )
    return {spec.name: spec for spec in specs}


def _receive(
    run: Run,
    specs: dict[str, tensor_pb2.TensorSpec],
    chunks: Iterable[tensor_pb2.TensorChunk],
) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, spec in specs.items():
        held = run.heads.tensor(spec.sha256)
        if held is not None and _fits(held, spec):
            tensors[name] = held
    missing = {name: spec for name, spec in specs.items() if name not in tensors}
    # The shapes were checked against the draft: their size is the bound.
    assembler = ChunkAssembler(missing.values(), max_bytes=1 << 62)
    sent = set()
    for chunk in chunks:
        if chunk.name not in tensors:
            assembler.feed(chunk)
            sent.add(chunk.name)
    absent = sorted(missing.keys() - sent)
    if absent:
        raise RefusedError(
            "tensors",
            f"no chunks of {', '.join(absent)}",
            "chunks of every tensor that the trainer does not hold under its SHA-256",
            "send it: the trainer restarted, or the versions that held it were forgotten",
            StatusCode.FAILED_PRECONDITION,
        )
    return tensors | assembler.finish()


def _is_known(run: Run, version: int, specs: dict[str, tensor_pb2.TensorSpec]) -> bool:
    if version not in run.heads.versions:
        return False
    return run.heads.digests(version) == (specs[LM_HEAD].sha256, specs[EMBED_TOKENS].sha256)


def _fits(tensor: torch.Tensor, spec: tensor_pb2.TensorSpec) -> bool:
    same_dtype = tensor.dtype == dtype_from_wire(spec.dtype, spec.name)
    return same_dtype and list(tensor.shape) == list(spec.shape)
