"""Reads a recording: any sample by its number, without loading the others."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draft_trainer.eagle3.head_config import HeadConfig
from draft_trainer.eagle3.policy_head import PolicyHead, PolicyHeads
from draft_trainer.feed.sample import Sample, group_of
from draft_trainer.recordings.recording_index import (
    PolicyEntry,
    RecordingFacts,
    ShardEntry,
    matrix_file,
    read_index,
)
from slipstream.refusal import RefusedError
from slipstream.tensors import digest

_TOKEN_FIELDS = (
    *("token_ids", "positions", "segment_ids", "loss_mask"),
    *("aux", "final_hidden", "sampled_logprobs", "sampled_logits"),
)
_RESTORE = "restore the recording from a copy, or record again"


class Recording:
    """The recorded samples of one run, in the order they were recorded.

    Tensors are views of memory-mapped files: what is not looked at is not read. Every file's size
    and SHA-256 is verified here, which reads all of them once.

    Args:
        directory: of the recording.
        on_progress: told bytes verified and bytes in all.

    Raises:
        RefusedError: no recording, or a file that is missing, damaged or contradicts the index.
    """

    def __init__(
        self, directory: Path, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.index = read_index(directory)
        self._directory = directory
        self._layers: list[int] | None = None
        if not self.index.shards:
            raise RefusedError(
                str(directory), "no samples", "at least one shard", "record states first"
            )
        self._shards: list[_Shard] = []
        done, total = 0, sum(shard.bytes for shard in self.index.shards)
        for entry in self.index.shards:
            self._shards.append(_Shard(directory / entry.file, entry, self.facts))
            unknown = sorted(set(entry.policy_versions) - self.index.policies.keys())
            if unknown:
                raise RefusedError(
                    f"{directory / entry.file}: policy_version",
                    f"{unknown}, whose lm_head was not recorded",
                    f"one of {sorted(self.index.policies)}",
                    _RESTORE,
                )
            done += entry.bytes
            if on_progress:
                on_progress(done, total)
        self._starts = list(accumulate((s.samples for s in self.index.shards), initial=0))

    @property
    def facts(self) -> RecordingFacts:
        """What does not change within the run."""
        return self.index.facts

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = bisect_right(self._starts, number) - 1
        return self._shards[shard].sample(number - self._starts[shard], self._layers)

    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return [n for shard in self._shards for n in shard.offsets.diff().tolist()]

    def groups(self) -> list[str]:
        """What every sample shares with others of its prompt (``Sample.group``)."""
        return [group for shard in self._shards for group in shard.groups()]

    def completion_token_counts(self) -> Tensor:
        """int64 [vocab]: how often each token was sampled, over all loss masks."""
        counts = torch.zeros(self.facts.vocab_size, dtype=torch.int64)
        for shard in self._shards:
            tokens = shard.column("token_ids")[shard.column("loss_mask")]
            counts += torch.bincount(tokens, minlength=len(counts))
        return counts

    def lm_head_ids(self) -> Tensor:
        """int64, ascending: the tokens whose lm_head rows every policy version recorded."""
        ids = torch.arange(self.facts.vocab_size)
        for entry in self.index.policies.values():
            if entry.lm_head_ids is not None:
                ids = ids[torch.isin(ids, self._matrix(entry.lm_head_ids))]
        return ids

    def select_layers(self, aux_layer_ids: tuple[int, ...]) -> None:
        """Narrow the samples' auxiliary states to these layers.

        Raises:
            RefusedError: a layer that was not recorded.
        """
        recorded = self.facts.aux_layer_ids
        if not set(aux_layer_ids) <= set(recorded):
            raise RefusedError(
                "auxiliary layers",
                f"{list(aux_layer_ids)} (after L layers)",
                f"layers among the recorded {list(recorded)}",
                "choose among them, or record the others",
            )
        columns = [recorded.index(layer) for layer in aux_layer_ids]
        self._layers = None if aux_layer_ids == recorded else columns

    def fit_to(self, draft: HeadConfig) -> None:
        """Narrow the samples to what a draft takes.

        Raises:
            RefusedError: the states are of another hidden size, vocabulary or of other layers.
        """
        for name, recorded, wanted in (
            ("target_hidden_size", self.facts.hidden_size, draft.target_hidden_size),
            ("vocab_size", self.facts.vocab_size, draft.vocab_size),
        ):
            if recorded != wanted:
                raise RefusedError(
                    f"the draft's {name}",
                    wanted,
                    f"{recorded}, the recorded policy's",
                    "give a draft made for this policy (draft-trainer init), or its recording",
                )
        self.select_layers(draft.aux_layer_ids)

    def policy_heads(self, draft_vocab_ids: Tensor) -> PolicyHeads:
        """Every recorded policy version, with lm_head rows of the draft vocabulary.

        Args:
            draft_vocab_ids: int [draft_vocab], ascending.

        Raises:
            RefusedError: a row was not recorded, a matrix is missing or damaged, or the lm_head
                is not the one that the states' logits were computed with.
        """
        heads = PolicyHeads(keep=len(self.index.policies))
        for version in sorted(self.index.policies):
            entry = self.index.policies[version]
            rows = self._rows(version, entry, draft_vocab_ids)
            heads.add(PolicyHead(version, rows, self._matrix(entry.embed_tokens)))
        for sample in self._one_of_each_version():
            _check_teacher(sample, heads.get(sample.policy_version), draft_vocab_ids)
        return heads

    def _rows(self, version: int, entry: PolicyEntry, wanted: Tensor) -> Tensor:
        matrix = self._matrix(entry.lm_head)
        held = torch.arange(self.facts.vocab_size)
        if entry.lm_head_ids is not None:
            held = self._matrix(entry.lm_head_ids)
        if torch.equal(held, wanted.long()):
            return matrix  # stays memory-mapped
        missing = wanted[~torch.isin(wanted, held)]
        if len(missing):
            raise RefusedError(
                "the draft vocabulary",
                f"{len(missing)} tokens without a recorded lm_head row, {missing[:4].tolist()} ...",
                f"tokens among the {len(held)} rows recorded of policy version {version}",
                "make the draft with draft-trainer init --states of this recording",
            )
        return matrix[torch.searchsorted(held, wanted.long().contiguous())]

    def _matrix(self, sha256: str) -> Tensor:
        path = self._directory / matrix_file(sha256)
        try:
            with safe_open(path, "pt") as file:
                matrix = file.get_tensor("weight")
        except (OSError, SafetensorError) as error:
            raise RefusedError(
                str(path), str(error), "a matrix of a policy version", _RESTORE
            ) from error
        found = digest(matrix).hex()
        if found != sha256:
            raise RefusedError(str(path), f"SHA-256 {found}", f"SHA-256 {sha256}", _RESTORE)
        return matrix

    def _one_of_each_version(self) -> Iterator[Sample]:
        seen: set[int] = set()
        for shard in self._shards:
            for i, version in enumerate(shard.policy_version.tolist()):
                if version not in seen:
                    seen.add(version)
                    yield shard.sample(i, None)


class _Shard:
    """One verified file of samples."""

    def __init__(self, path: Path, entry: ShardEntry, facts: RecordingFacts) -> None:
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
            self._file = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise RefusedError(str(path), str(error), "a shard of the index", _RESTORE) from error
        if found != (entry.sha256, entry.bytes):
            raise RefusedError(
                str(path),
                f"{found[1]} bytes with SHA-256 {found[0]}",
                f"{entry.bytes} bytes with SHA-256 {entry.sha256}",
                _RESTORE,
            )
        width = facts.hidden_size
        wide = {"aux": [len(facts.aux_layer_ids) * width], "final_hidden": [width]}
        for name in _TOKEN_FIELDS:
            shape = self._file.get_slice(name).get_shape()
            if shape != [entry.tokens, *wide.get(name, [])]:
                wanted = f"{[entry.tokens, *wide.get(name, [])]}, as the index says"
                raise RefusedError(f"{path}: {name}", shape, wanted, _RESTORE)
        self.offsets, self.policy_version = self.column("offsets"), self.column("policy_version")
        self._temperatures = self.column("temperature").tolist()
        self._ids: list[str] = json.loads(self._file.metadata()["sample_ids"])

    def column(self, name: str) -> Tensor:
        """A field of all samples."""
        return self._file.get_tensor(name)

    def sample(self, i: int, layers: list[int] | None) -> Sample:
        """Sample ``i``, with these of its auxiliary layers."""
        start, stop = self.offsets[i : i + 2].tolist()
        columns = {name: self._file.get_slice(name)[start:stop] for name in _TOKEN_FIELDS}
        if layers is not None:
            width = columns["final_hidden"].shape[1]
            parts = columns["aux"].split(width, dim=1)
            columns["aux"] = torch.cat([parts[layer] for layer in layers], dim=1)
        version = int(self.policy_version[i])
        return Sample(self._ids[i], version, self._temperatures[i], **columns)

    def groups(self) -> Iterator[str]:
        """Of every sample."""
        lengths = self.offsets.diff().tolist()
        tokens = self.column("token_ids").split(lengths)
        masks = self.column("loss_mask").split(lengths)
        return map(group_of, self._ids, tokens, masks)


def _check_teacher(sample: Sample, head: PolicyHead, draft_vocab_ids: Tensor) -> None:
    """Refuse an lm_head that did not make the sample's logits, or states that are not its input."""
    order = torch.searchsorted(draft_vocab_ids.contiguous(), sample.token_ids.long())
    order = order.clamp(max=len(draft_vocab_ids) - 1)
    known = sample.loss_mask & (draft_vocab_ids[order] == sample.token_ids)
    known[0] = False
    at = known.nonzero().flatten()
    if not len(at):
        return
    hidden = sample.final_hidden[at - 1].float()
    logits = (hidden * head.lm_head_rows[order[at]].float()).sum(1)
    recorded = sample.sampled_logits[at]
    error, size = (logits - recorded).abs().median(), recorded.abs().median()
    # bf16 states, weights and logits differ by well under 1 %; another matrix by all of it.
    if error > 0.05 + 0.02 * size:
        raise RefusedError(
            f"lm_head of policy version {sample.policy_version}",
            f"logits that differ by {error:.3g} (median) from the recorded ones of size {size:.3g}",
            "the lm_head that the states were recorded with, and its input as final_hidden",
            "record lm_head and states of the same policy version",
        )
