"""Writes a recording: samples into shards of bounded size, each there whole or not at all."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_trainer.files import written_whole
from draft_trainer.recordings.recording import (
    INDEX_FILE,
    PolicyEntry,
    RecordingFacts,
    RecordingIndex,
    ShardEntry,
    matrix_file,
)
from slipstream.errors import RefusedError
from slipstream.sample import STATE_DTYPES, Sample
from slipstream.tensors import digest

DEFAULT_SHARD_BYTES = 256 << 20


class RecordingWriter:
    """A new recording. Not thread-safe; a context manager, whose end writes the last shard.

    A kill loses the samples that were not in a shard yet, ``shard_bytes`` at most.

    Args:
        directory: made; refused where it holds anything.
        facts: of the run.
        shard_bytes: samples are written when they would exceed this together.

    Attributes:
        index: what has been written.
        nbytes: bytes written and waiting to be written, matrices included.

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
        self.index = RecordingIndex(facts=facts)
        self.nbytes = 0
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._waiting: list[Sample] = []
        self._waiting_bytes = 0
        self._replace_index()

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
    def waiting(self) -> int:
        """Samples that are in no shard yet."""
        return len(self._waiting)

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
        facts = self.index.facts
        rows = facts.vocab_size if lm_head_ids is None else len(lm_head_ids)
        for name, matrix, height in (
            ("lm_head", lm_head, rows),
            ("embed_tokens", embed_tokens, facts.vocab_size),
        ):
            wanted = [height, facts.hidden_size]
            if list(matrix.shape) != wanted or not matrix.is_floating_point():
                found = f"{matrix.dtype} {list(matrix.shape)}"
                raise RefusedError(name, found, f"floating point {wanted}", "pass the policy's own")
        if version in self.index.policies:
            raise RefusedError(
                "policy_version", version, "a version that was not added", "add each of them once"
            )
        entry = PolicyEntry(
            lm_head=self._write_matrix(lm_head),
            lm_head_ids=None if lm_head_ids is None else self._write_matrix(lm_head_ids.long()),
            embed_tokens=self._write_matrix(embed_tokens),
        )
        self._replace_index(policies={**self.index.policies, version: entry})

    def add(self, sample: Sample) -> None:
        """Take a sample; writes a shard when enough wait.

        Raises:
            RefusedError: the sample does not fit the run, is not finite, or its policy version
                was not added.
            OSError: the shard could not be written; its samples are lost.
        """
        check_sample(sample, self.index.facts)
        if (version := sample.policy_version) not in self.index.policies:
            raise RefusedError(
                "policy_version", version, sorted(self.index.policies), "call add_policy before it"
            )
        if self._waiting and self._waiting_bytes + sample.nbytes > self._shard_bytes:
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
        name = f"states-{len(self.index.shards):06d}.safetensors"
        headers = [sample.header.SerializeToString() for sample in samples]
        tensors = {
            "headers": torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8),
            "header_ends": torch.tensor(list(accumulate(map(len, headers)))),
            "blocks": torch.cat([sample.block[: sample.nbytes] for sample in samples]),
            "block_ends": torch.tensor(list(accumulate(sample.nbytes for sample in samples))),
        }
        with written_whole(self._directory / name) as temporary:
            save_file(tensors, temporary)
            with temporary.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = temporary.stat().st_size
        entry = ShardEntry(
            file=name,
            bytes=size,
            sha256=sha256,
            samples=len(samples),
            tokens=sum(sample.tokens for sample in samples),
            policy_versions=tuple(sorted({sample.policy_version for sample in samples})),
        )
        self._replace_index(shards=(*self.index.shards, entry))
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
        self.index = self.index.model_copy(update=changes)
        with written_whole(self._directory / INDEX_FILE) as temporary:
            temporary.write_text(self.index.model_dump_json(indent=2) + "\n")


def check_sample(sample: Sample, facts: RecordingFacts) -> None:
    """Refuse what would be trained on without an error and mean nothing.

    Raises:
        RefusedError: another shape or dtype than the run's, a token outside the vocabulary, or a
            state that is not finite; ``field`` is the sample's.
    """
    layout = sample.layout
    sizes = (layout.aux_layers, layout.hidden_size)
    wanted = (len(facts.aux_layer_ids), facts.hidden_size)
    if sizes != wanted:
        _refuse(sample, "aux", "{} layers of {}".format(*sizes), "{} of {}".format(*wanted))
    if layout.dtype not in STATE_DTYPES:
        _refuse(sample, "aux and final_hidden", layout.dtype, f"one of {STATE_DTYPES}")
    if int(sample.token_ids.min()) < 0 or int(sample.token_ids.max()) >= facts.vocab_size:
        _refuse(sample, "token_ids", int(sample.token_ids.max()), f"0 to {facts.vocab_size - 1}")
    for name in ("sampled_logprobs", "sampled_logits", "aux", "final_hidden"):
        if not bool(getattr(sample, name).isfinite().all()):
            _refuse(sample, name, "values that are not finite", "finite values")


def _refuse(sample: Sample, name: str, found: object, expected: object) -> None:
    raise RefusedError(
        f"sample {sample.sample_id!r} {name}", found, expected, "look at what was captured"
    )
