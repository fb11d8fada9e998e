"""Recorded states on disk: one folder per run, written in shards, read sample by sample.

    index.json                  the run's facts, its policy versions, its shards
    states-000000.safetensors   shards, immutable once the index names them
    matrix-<sha256>.safetensors lm_head rows, their ids and embeddings, once per content

A shard holds S samples in their one form (``slipstream.sample``), one behind the other: ``headers``
and ``blocks``, uint8, and ``header_ends`` and ``block_ends``, int64 [S]. The file of a matrix is
named by the SHA-256 over the matrix's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draft_trainer.checkpoints import PolicyCheckpoint
from draft_trainer.drafters import DraftShape
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.ingest.teacher import TeacherCheck
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.sampling import LogitForm
from slipstream.tensors import digest
from slipstream.v1 import draft_trainer_pb2 as pb

INDEX_FILE = "index.json"
FORMAT: Final = "slipstream.recording/3"
_RECORD = (
    "make a recording with draft-trainer record, or with recording.directory of draft-trainer serve"
)
SAME_POLICY = 0.5
"""Mean cosine of lm_head rows; versions of one policy are above 0.9, two policies near 0."""

COMPARED_ROWS = 512

_RESTORE = "restore the recording from a copy, or record again"
_Count = Annotated[int, Field(ge=0)]
_Size = Annotated[int, Field(ge=1)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecordingFacts(_Strict):
    """What does not change within a run.

    Attributes:
        run_id: the run's.
        hidden_size: H of the policy.
        vocab_size: of the policy.
        num_hidden_layers: of the policy.
        aux_layer_ids: the recorded layers, ascending, as ``layer_convention`` says.
        layer_convention: "after_layers": L means after L decoder layers, 0 the embeddings.
        logit_scale, logit_soft_cap: how the policy makes its logits, see ``LogitForm``.
    """

    run_id: str
    hidden_size: _Size
    vocab_size: _Size
    num_hidden_layers: _Size
    aux_layer_ids: tuple[_Count, ...]
    layer_convention: Literal["after_layers"] = "after_layers"
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0

    @field_validator("aux_layer_ids")
    @classmethod
    def _ascending(cls, ids: tuple[int, ...]) -> tuple[int, ...]:
        if list(ids) != sorted(set(ids)):
            raise ValueError("layer ids in ascending order")
        return ids


class PolicyEntry(_Strict):
    """One policy version: the SHA-256 of its matrices.

    Attributes:
        lm_head: [R, H], the recorded rows of lm_head.
        lm_head_ids: int64 [R], their token ids, ascending; None where every row is there.
        embed_tokens: [vocab, H].
        lm_head_bias: [R]; None where the lm_head has none.
    """

    lm_head: _Digest
    lm_head_ids: _Digest | None
    embed_tokens: _Digest
    lm_head_bias: _Digest | None = None


class ShardEntry(_Strict):
    """One file of samples: its name, size and SHA-256, and what its samples amount to."""

    file: Annotated[str, Field(pattern=r"^states-\d{6,}\.safetensors$")]
    bytes: _Size
    sha256: _Digest
    samples: _Size
    tokens: _Size
    policy_versions: tuple[_Count, ...]


class RecordingIndex(_Strict):
    """The whole of index.json."""

    format: Literal["slipstream.recording/3"] = FORMAT
    facts: RecordingFacts
    policies: dict[_Count, PolicyEntry] = {}
    shards: tuple[ShardEntry, ...] = ()

    @property
    def samples(self) -> int:
        """Of all shards."""
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Of all shards."""
        return sum(shard.tokens for shard in self.shards)


def read_index(directory: Path) -> RecordingIndex:
    """The index of a recording.

    Raises:
        RefusedError: no recording, or one of another format or with a wrong field.
    """
    path = directory / INDEX_FILE
    try:
        return RecordingIndex.model_validate_json(path.read_bytes())
    except OSError as error:
        inside = sorted(p.parent.name for p in directory.glob(f"*/{INDEX_FILE}"))
        advice = f"give one of the recordings in it: {', '.join(inside)}" if inside else _RECORD
        missing = isinstance(error, FileNotFoundError)
        found = "no recording there" if missing else error.strerror
        raise RefusedError(str(path), found, "the index of a recording", advice) from error
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise RefusedError(
            f"{path}: {key}".rstrip(": "), detail["msg"], f"an index of {FORMAT}", _RECORD
        ) from error


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
        self._layers = self.facts.aux_layer_ids
        self._samples: list[tuple[pb.VerifierStates, Tensor]] = []
        if not self.index.shards:
            raise RefusedError(
                str(directory), "no samples", "at least one shard", "record states first"
            )
        done, total = 0, sum(shard.bytes for shard in self.index.shards)
        for entry in self.index.shards:
            path, known = directory / entry.file, self.index.policies
            self._samples += _read_shard(path, entry)
            if unknown := sorted(set(entry.policy_versions) - known.keys()):
                found = f"{unknown}, whose lm_head was not recorded"
                raise RefusedError(f"{path}: policy_version", found, sorted(known), _RESTORE)
            done += entry.bytes
            if on_progress:
                on_progress(done, total)

    @property
    def facts(self) -> RecordingFacts:
        """What does not change within the run."""
        return self.index.facts

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> Sample:
        """A sample, with the selected layers alone."""
        sample, recorded = self._recorded(number), self.facts.aux_layer_ids
        if self._layers == recorded:
            return sample
        parts = sample.aux.split(self.facts.hidden_size, dim=1)
        chosen = torch.cat(
            [sample.aux[:, :0], *(parts[recorded.index(layer)] for layer in self._layers)], dim=1
        )
        return sample.repacked(aux=chosen, aux_layers=self._layers)

    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return [header.packed.tokens for header, _ in self._samples]

    def groups(self) -> list[str]:
        """What every sample shares with others of its prompt (``Sample.group``)."""
        return [self._recorded(number).group for number in range(len(self))]

    def completion_token_counts(self) -> Tensor:
        """int64 [vocab]: how often each token was sampled, over all loss masks."""
        counts = torch.zeros(self.facts.vocab_size, dtype=torch.int64)
        for sample in map(self._recorded, range(len(self))):
            counts += torch.bincount(sample.token_ids[sample.loss_mask], minlength=len(counts))
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
            found = f"{[*aux_layer_ids]} (after L layers)"
            raise RefusedError(
                "auxiliary layers", found, f"some of {[*recorded]}", "choose among them"
            )
        self._layers = aux_layer_ids

    def check_policy(self, policy: PolicyCheckpoint) -> None:
        """Raise RefusedError unless the recorded states can be this policy's: by its sizes, and by
        its lm_head, which training hardly turns and another policy does not have."""
        next_step = "give --states of --policy"
        for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
            recorded, wanted = getattr(self.facts, name), policy.config.get(name)
            if recorded != wanted:
                raise RefusedError(f"the recorded policy's {name}", recorded, wanted, next_step)
        versions = {min(self.index.policies), max(self.index.policies)}
        alike = max(self._likeness(self.index.policies[v], policy.lm_head) for v in versions)
        if not alike >= SAME_POLICY:
            found = f"rows with a cosine of {alike:.2f} to those of --policy: another policy's"
            expected = f"at least {SAME_POLICY}, as between versions of one policy"
            raise RefusedError("the recorded policy's lm_head", found, expected, next_step)

    def _likeness(self, entry: PolicyEntry, lm_head: Tensor) -> float:
        """Mean cosine between recorded rows of lm_head and the same rows of another one."""
        rows, ids = self._matrix(entry.lm_head), torch.arange(self.facts.vocab_size)
        if entry.lm_head_ids is not None:
            ids = self._matrix(entry.lm_head_ids)
        some = torch.arange(0, len(ids), max(1, len(ids) // COMPARED_ROWS))
        theirs = lm_head[ids[some]].float()
        return float(torch.cosine_similarity(rows[some].float(), theirs, dim=1).mean())

    def fit_to(self, draft: DraftShape, steps: int = 1) -> None:
        """Narrow the samples to what a draft takes.

        Args:
            draft: its shape.
            steps: how far it is unrolled; samples past its sliding window are left out.

        Raises:
            RefusedError: the states are of another hidden size, vocabulary or of other layers.
        """
        for name, recorded, wanted in (
            ("target_hidden_size", self.facts.hidden_size, draft.target_hidden_size),
            ("vocab_size", self.facts.vocab_size, draft.vocab_size),
        ):
            if recorded != wanted:
                raise RefusedError(
                    f"the draft's {name}", wanted, recorded, "give a draft of the recorded policy"
                )
        self.select_layers(draft.aux_layer_ids)
        if draft.max_row_tokens is not None:
            longest = draft.max_row_tokens - steps + 1
            self._samples = [each for each in self._samples if each[0].packed.tokens <= longest]

    def policy_heads(self, draft_vocab_ids: Tensor) -> PolicyHeads:
        """Every recorded policy version, with lm_head rows of the draft vocabulary.

        Args:
            draft_vocab_ids: int [draft_vocab], ascending.

        Raises:
            RefusedError: a row was not recorded, a matrix is missing or damaged, or the lm_head
                is not the one that the states' logits were computed with.
        """
        heads = PolicyHeads(keep=len(self.index.policies))
        form = LogitForm(self.facts.logit_scale, self.facts.logit_soft_cap)
        for version, entry in sorted(self.index.policies.items()):
            rows = self._rows(version, entry, entry.lm_head, draft_vocab_ids)
            embed, bias = self._matrix(entry.embed_tokens), None
            if entry.lm_head_bias is not None:
                bias = self._rows(version, entry, entry.lm_head_bias, draft_vocab_ids)
            heads.add(PolicyHead(version, rows, embed, bias, form=form))
        unchecked, check = set(heads.versions), TeacherCheck(draft_vocab_ids)
        for sample in map(self._recorded, range(len(self))):
            if (version := sample.policy_version) in unchecked:
                unchecked.remove(version)
                (found,) = check.check([sample], heads.get(version))
                if found.refusal is not None:
                    raise found.refusal
        return heads

    def _rows(self, version: int, entry: PolicyEntry, sha256: str, wanted: Tensor) -> Tensor:
        matrix = self._matrix(sha256)
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

    def _recorded(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return Sample(*self._samples[number])


def _read_shard(path: Path, entry: ShardEntry) -> list[tuple[pb.VerifierStates, Tensor]]:
    """Headers and memory-mapped blocks of a verified shard."""
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        found = f"{path.stat().st_size} bytes with SHA-256 {sha256}"
        wanted = f"{entry.bytes} bytes with SHA-256 {entry.sha256}"
        if found != wanted:
            raise RefusedError(str(path), found, wanted, _RESTORE)
        with safe_open(path, "pt") as shard:
            headers, blocks = (
                shard.get_tensor("headers").numpy().tobytes(),
                shard.get_tensor("blocks"),
            )
            ends = [[0, *shard.get_tensor(f"{name}_ends").tolist()] for name in ("header", "block")]
    except (OSError, SafetensorError) as error:
        raise RefusedError(str(path), str(error), "a shard of the index", _RESTORE) from error
    return [
        (pb.VerifierStates.FromString(headers[a:b]), blocks[c:d])
        for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True)
    ]


def matrix_file(sha256: str) -> str:
    """The name of the file that holds a matrix."""
    return f"matrix-{sha256}.safetensors"
