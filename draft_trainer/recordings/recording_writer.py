"""Writes a recording: samples into shards of bounded size, each there whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_trainer.durable import written_whole
from draft_trainer.feed.sample import Sample
from draft_trainer.recordings.recording_index import (
    FORMAT,
    PolicyEntry,
    RecordingFacts,
    RecordingIndex,
    ShardEntry,
    matrix_file,
    write_index,
)
from slipstream.refusal import RefusedError
from slipstream.tensors import digest

DEFAULT_SHARD_BYTES = 256 << 20
STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = ("token_ids", "positions", "segment_ids")
_FLOATS = ("sampled_logprobs", "sampled_logits")
_STATES = ("aux", "final_hidden")


class RecordingWriter:
    """A new recording. Not thread-safe; a context manager, whose end writes the last shard.

    A kill loses the samples that were not in a shard yet, ``shard_bytes`` at most.

    Args:
        directory: made; refused where it holds anything.
        facts: of the run.
        shard_bytes: samples are written when they would exceed this together.

    Raises:
        RefusedError: the directory is not empty.
        OSError: it cannot be written.
    """

    def __init__(
        self, directory: Path, facts: RecordingFacts, shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        # States tell what was in the prompts.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise RefusedError(
                str(directory), "files in it", "a new or empty folder", "record into another folder"
            )
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._index = RecordingIndex(format=FORMAT, facts=facts)
        self._waiting: list[Sample] = []
        self._waiting_bytes = 0
        self.nbytes = 0
        """Bytes written and waiting to be written, matrices included."""
        write_index(directory, self._index)

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()

    @property
    def index(self) -> RecordingIndex:
        """What has been written."""
        return self._index

    @property
    def waiting(self) -> int:
        """Samples that are in no shard yet."""
        return len(self._waiting)

    def has_policy(self, version: int) -> bool:
        """Whether ``add_policy`` was called for this version."""
        return version in self._index.policies

    def add_policy(
        self, version: int, lm_head: Tensor, lm_head_ids: Tensor | None, embed_tokens: Tensor
    ) -> None:
        """Write a policy version's matrices; equal ones are written once.

        Args:
            version: not added before.
            lm_head: floating [R, H], rows of lm_head.
            lm_head_ids: int [R], their ascending token ids; None when R is the vocabulary.
            embed_tokens: floating [vocab, H].

        Raises:
            RefusedError: added before, or a shape that does not fit the run.
            OSError: the disk is full.
        """
        facts = self._index.facts
        rows = facts.vocab_size if lm_head_ids is None else len(lm_head_ids)
        for name, matrix, height in (
            ("lm_head", lm_head, rows),
            ("embed_tokens", embed_tokens, facts.vocab_size),
        ):
            wanted = [height, facts.hidden_size]
            if list(matrix.shape) != wanted or not matrix.is_floating_point():
                found = f"{matrix.dtype} {list(matrix.shape)}"
                raise RefusedError(name, found, f"floating point {wanted}", "pass the policy's own")
        if self.has_policy(version):
            raise RefusedError(
                "policy_version", version, "a version that was not added", "add each of them once"
            )
        entry = PolicyEntry(
            lm_head=self._write_matrix(lm_head),
            lm_head_ids=None if lm_head_ids is None else self._write_matrix(lm_head_ids.long()),
            embed_tokens=self._write_matrix(embed_tokens),
        )
        self._replace_index(policies={**self._index.policies, version: entry})

    def add(self, sample: Sample) -> None:
        """Take a sample; writes a shard when enough wait.

        Raises:
            RefusedError: the sample does not fit the run, is not finite, or its policy version
                was not added.
            OSError: the shard could not be written; its samples are lost.
        """
        check_sample(sample, self._index.facts)
        if not self.has_policy(sample.policy_version):
            raise RefusedError(
                "policy_version",
                sample.policy_version,
                f"one of {sorted(self._index.policies)}",
                "call add_policy before the first sample of a version",
            )
        full = self._waiting_bytes + sample.nbytes > self._shard_bytes
        # One dtype per tensor, so one per shard.
        if self._waiting and (full or sample.aux.dtype != self._waiting[0].aux.dtype):
            self.flush()
        self._waiting.append(sample)
        self._waiting_bytes += sample.nbytes
        self.nbytes += sample.nbytes

    def flush(self) -> int:
        """Write what waits as a shard; how many samples that was. Raises OSError: they are lost."""
        samples, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        if not samples:
            return 0
        name = f"states-{len(self._index.shards):06d}.safetensors"
        path = self._directory / name
        with written_whole(path) as temporary:
            ids = json.dumps([sample.sample_id for sample in samples])
            save_file(_columns(samples), temporary, metadata={"sample_ids": ids})
            with temporary.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = temporary.stat().st_size
        entry = ShardEntry(
            file=name,
            bytes=size,
            sha256=sha256,
            samples=len(samples),
            tokens=sum(sample.num_tokens for sample in samples),
            policy_versions=tuple(sorted({sample.policy_version for sample in samples})),
            temperatures=tuple(sorted({sample.temperature for sample in samples})),
        )
        self._replace_index(shards=(*self._index.shards, entry))
        return len(samples)

    def _write_matrix(self, matrix: Tensor) -> str:
        sha256 = digest(matrix).hex()
        path = self._directory / matrix_file(sha256)
        if not path.exists():
            with written_whole(path) as temporary:
                save_file({"weight": matrix.detach().cpu().contiguous()}, temporary)
            self.nbytes += matrix.nbytes
        return sha256

    def _replace_index(self, **changes: object) -> None:
        self._index = self._index.model_copy(update=changes)
        write_index(self._directory, self._index)


def check_sample(sample: Sample, facts: RecordingFacts) -> None:
    """Refuse what would be trained on without an error and mean nothing.

    Raises:
        RefusedError: a wrong shape or dtype, a token outside the vocabulary, or a state that is
            not finite; ``field`` is the sample's.
    """
    tokens, hidden = sample.num_tokens, facts.hidden_size
    states = ([tokens, len(facts.aux_layer_ids) * hidden], [tokens, hidden])
    shapes = {name: [tokens] for name in (*_INTEGERS, *_FLOATS, "loss_mask")}
    for name, shape in (shapes | dict(zip(_STATES, states, strict=True))).items():
        if list(getattr(sample, name).shape) != shape:
            _refuse(sample, name, list(getattr(sample, name).shape), shape)
    if sample.aux.dtype not in STATE_DTYPES or sample.final_hidden.dtype != sample.aux.dtype:
        found = f"{sample.aux.dtype} and {sample.final_hidden.dtype}"
        _refuse(sample, "aux and final_hidden", found, f"one of {STATE_DTYPES}, the same")
    if int(sample.token_ids.min()) < 0 or int(sample.token_ids.max()) >= facts.vocab_size:
        _refuse(sample, "token_ids", int(sample.token_ids.max()), f"0 to {facts.vocab_size - 1}")
    for name in (*_FLOATS, *_STATES):
        if not bool(getattr(sample, name).isfinite().all()):
            _refuse(sample, name, "values that are not finite", "finite values")


def _columns(samples: list[Sample]) -> dict[str, Tensor]:
    """The fields of all samples one behind the other."""
    columns = {name: torch.cat([getattr(s, name).int() for s in samples]) for name in _INTEGERS}
    for name in (*_FLOATS, *_STATES, "loss_mask"):
        columns[name] = torch.cat([getattr(sample, name) for sample in samples])
    lengths = torch.tensor([0, *(sample.num_tokens for sample in samples)])
    return columns | {
        "offsets": lengths.cumsum(0),
        "policy_version": torch.tensor([sample.policy_version for sample in samples]),
        "temperature": torch.tensor([s.temperature for s in samples], dtype=torch.float64),
    }


def _refuse(sample: Sample, name: str, found: object, expected: object) -> None:
    raise RefusedError(
        f"sample {sample.sample_id!r} {name}",
        found,
        expected,
        "look at the policy's forward pass and at what was captured of it",
    )
