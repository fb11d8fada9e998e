"""Makes a release from a checkpoint that was trained elsewhere.

Nothing from the client is trusted: none of its paths is opened, what arrives is bounded before it
is kept, and the checkpoint is read and checked here like any other. It has to be of the shape and
vocabulary of this registry's drafts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError

from draft_trainer.config import DraftConfig
from draft_trainer.drafters import Checkpoint, Draft, Drafter
from draft_trainer.ingest.run import Run, Runs
from draft_trainer.releases.gate import Gate
from draft_trainer.releases.pointer import PointerStore
from draft_trainer.releases.registry import Registry
from slipstream.checkpoints import pickles, write_checkpoint
from slipstream.errors import RefusedError, StatusCode, clean
from slipstream.tensors import ChunkAssembler
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2, tensor_pb2


def read_foreign(drafter: Drafter, directory: Path, policy: Path | None = None) -> Checkpoint:
    """Read a checkpoint in any layout, to be released.

    Raises:
        RefusedError: a pickle is in it, or ``Drafter.read`` refuses it.
    """
    for name in pickles(directory):
        raise RefusedError(
            str(directory / name),
            "a pickle",
            "a checkpoint of safetensors alone",
            "pickles run code: give a folder with config.json and the safetensors only",
        )
    return drafter.read(directory, policy)


def release_foreign(
    registry: Registry,
    checkpoint: Checkpoint,
    head: Draft,
    origin: str,
    result: release_pb2.Verdict | None = None,
) -> release_pb2.ReleaseManifest:
    """Write an imported draft as a release, without promoting it.

    Raises:
        RefusedError: another process writes the registry.
        OSError: the disk is full, or the folder cannot be written.
    """
    manifest = release_pb2.ReleaseManifest(
        source=release_pb2.RELEASE_SOURCE_IMPORTED, origin=origin, assumed=checkpoint.assumed
    )
    if result is not None:
        manifest.run_id = result.run_id
    if result is not None and result.HasField("gate"):
        manifest.gate.CopyFrom(result.gate)
        manifest.draft_sample_method = result.gate.draft_sample_method
        manifest.num_speculative_tokens = result.gate.num_speculative_tokens
    return registry.create(head, manifest, next(iter(checkpoint.tensors.values())).dtype)


logger = logging.getLogger(__name__)

MAX_CONFIG_CHARACTERS = 1 << 20
MAX_ORIGIN_CHARACTERS = 4096
MAX_DIMENSIONS = 8
MAX_ASSUMED = 16
_BYTES_PER_ELEMENT = 8  # of the widest type that may cross


@dataclass(frozen=True, eq=False)
class Imports:
    """Imports one checkpoint at a time, because ``server.service`` admits one call."""

    registry: Registry
    runs: Runs
    gate: Gate
    pointer: PointerStore
    bounds: DraftConfig
    on_promoted: Callable[[], None]
    wake: Callable[[], object]

    def take(
        self, header: pb.ImportHeader, chunks: Iterable[tensor_pb2.TensorChunk]
    ) -> pb.ImportReleaseResponse:
        """Receive, check, gate if asked, and write.

        Raises:
            RefusedError: it is too large, not what its hashes say, no draft, a draft of another
                shape or vocabulary, or to be gated without a run; or the disk is full. The
                registry is as it was.
        """
        try:
            run = self._run() if header.gate else None
            self._check(header)
            with TemporaryDirectory(prefix=".staging-", dir=self.registry.root) as folder:
                self._receive(header, chunks, Path(folder))
                return self._release(Path(folder), header, run)
        except torch.AcceleratorError:
            # The training thread finds what has failed, and ends the process.
            self.wake()
            raise
        except (OSError, SafetensorError) as error:
            raise RefusedError(
                "registry",
                str(error),
                "a folder that can be written, and space for the release",
                "free some space, then import it again",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error

    def _run(self) -> Run:
        run = self.runs.current
        if run is None:
            raise RefusedError(
                "gate",
                "no run",
                "a run whose held-out states it can be gated on",
                "import it without --gate, or once a policy feeds this trainer",
                StatusCode.FAILED_PRECONDITION,
            )
        return run

    def _check(self, header: pb.ImportHeader) -> None:
        if (size := len(header.config_json)) > MAX_CONFIG_CHARACTERS:
            most = f"at most {MAX_CONFIG_CHARACTERS}"
            raise RefusedError("config_json", size, most, "send a draft's checkpoint")
        for spec in header.tensors:
            # An empty tensor of absurd sizes has no bytes, and torch cannot make it.
            if len(spec.shape) > MAX_DIMENSIONS or any(size < 1 for size in spec.shape):
                raise RefusedError(
                    f"tensors[{spec.name[:64]}].shape",
                    list(spec.shape)[:16],
                    f"at most {MAX_DIMENSIONS} sizes, each at least 1",
                    "send a draft's checkpoint",
                )
        if len({spec.name for spec in header.tensors}) < len(header.tensors):
            expected = "names of parameters, each once"
            raise RefusedError(
                "tensors", "duplicate names", expected, "send the tensors of one checkpoint"
            )

    def _receive(
        self, header: pb.ImportHeader, chunks: Iterable[tensor_pb2.TensorChunk], folder: Path
    ) -> None:
        oldest = self.registry.get(self.registry.versions()[0])
        elements = sum(math.prod(spec.shape) for spec in oldest.tensors)
        assembler = ChunkAssembler(header.tensors, elements * _BYTES_PER_ELEMENT)
        for chunk in chunks:
            assembler.feed(chunk)
        write_checkpoint(folder, header.config_json, assembler.finish())

    def _release(
        self, folder: Path, header: pb.ImportHeader, run: Run | None
    ) -> pb.ImportReleaseResponse:
        registry, origin = self.registry, header.origin
        checkpoint = read_foreign(registry.drafter, folder)
        # What the client's reader had to assume, it has written out in what was sent.
        told = dict.fromkeys((*map(clean, header.assumed[:MAX_ASSUMED]), *checkpoint.assumed))
        checkpoint = replace(checkpoint, assumed=tuple(told))
        oldest = registry.drafter.read(registry.path(registry.versions()[0]))
        head = checkpoint.draft_like(oldest)
        result = self.gate.judge(lambda: [head], run, None)[0] if run is not None else None
        manifest = release_foreign(registry, checkpoint, head, origin, result)
        version, promoted = manifest.draft_version, False
        if result is not None:
            passed = result.outcome == "passed"
            promoted = passed and self.pointer.offer(version, result.incumbent_version)
            self.gate.record(result, version)
        reason = "not gated" if result is None else result.reason
        logger.info("draft %d imported from %r: %s", version, origin, reason)
        if promoted:
            self.on_promoted()
        registry.retain(self.bounds)
        return pb.ImportReleaseResponse(manifest=manifest, verdict=result, promoted=promoted)
