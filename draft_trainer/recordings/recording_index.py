"""What a folder of recorded states holds, in one file: ``index.json``.

A recording is one run's::

    index.json                  this: the run's facts, its policy versions, its shards
    states-000000.safetensors   shards, immutable once they are named here
    matrix-<sha256>.safetensors lm_head rows, their ids and embeddings, once per content

A shard holds the samples' fields one behind the other, N tokens in all (``token_ids`` [N],
``aux`` [N, A * H], ...), and for its S samples ``offsets`` int64 [S + 1], ``policy_version``
int64 [S] and ``temperature`` float64 [S]; their ids are JSON in the file's metadata. The file of
a matrix is named by the SHA-256 over the matrix's bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from draft_trainer.durable import written_whole
from slipstream.refusal import RefusedError

INDEX_FILE = "index.json"
FORMAT: Final = "slipstream.recording/1"
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
    """

    run_id: str
    hidden_size: _Size
    vocab_size: _Size
    num_hidden_layers: _Size
    aux_layer_ids: Annotated[tuple[_Count, ...], Field(min_length=1)]
    layer_convention: Literal["after_layers"] = "after_layers"

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
    """

    lm_head: _Digest
    lm_head_ids: _Digest | None
    embed_tokens: _Digest


class ShardEntry(_Strict):
    """One file of samples.

    Attributes:
        file: its name.
        bytes: its size.
        sha256: over the whole file.
        samples: how many.
        tokens: of all of them.
        policy_versions: that its samples are of, ascending.
        temperatures: of their rollouts, ascending.
    """

    file: Annotated[str, Field(pattern=r"^states-\d{6,}\.safetensors$")]
    bytes: _Size
    sha256: _Digest
    samples: _Size
    tokens: _Size
    policy_versions: tuple[_Count, ...]
    temperatures: tuple[float, ...]


class RecordingIndex(_Strict):
    """The whole file."""

    format: Literal["slipstream.recording/1"]
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
        raise RefusedError(str(path), error.strerror, "the index of a recording", advice) from error
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise RefusedError(
            f"{path}: {key}".rstrip(": "), detail["msg"], f"an index of {FORMAT}", _RECORD
        ) from error


def write_index(directory: Path, index: RecordingIndex) -> None:
    """Replace the index whole."""
    with written_whole(directory / INDEX_FILE) as temporary:
        temporary.write_text(index.model_dump_json(indent=2) + "\n")


def matrix_file(sha256: str) -> str:
    """The name of the file that holds a matrix."""
    return f"matrix-{sha256}.safetensors"


_RECORD = "record states with [recording] of draft-trainer serve, or offline"
