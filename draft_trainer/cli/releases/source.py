"""Where a command finds releases: a running trainer, or a registry's folder."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from draft_trainer.cli.trainer import add_address, trainer
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2

if TYPE_CHECKING:
    from torch import Tensor

    from draft_trainer.releases.registry import Registry

MAX_RELEASE_BYTES = 64 << 30
"""Bound on a release that is fetched; far beyond any draft head."""


class Releases(Protocol):
    """What can be asked about releases."""

    def listing(self) -> tuple[list[release_pb2.ReleaseManifest], list[release_pb2.ReleaseUse]]:
        """The manifests that can be read, and what else is known of every release; oldest first."""

    def tensors(self, version: int) -> tuple[release_pb2.ReleaseManifest, dict[str, Tensor]]:
        """One release, every tensor verified. Raises RefusedError: none, or it is damaged."""

    def verify(self, version: int) -> None:
        """Check everything of a release. Raises RefusedError with what differs."""

    def verdicts(self, newest: int) -> list[release_pb2.Verdict]:
        """The newest so many verdicts of the gate (0: all that are kept), oldest first."""


def add_source(parser: argparse.ArgumentParser) -> None:
    """The options that choose between the two."""
    parser.add_argument(
        "--registry",
        type=Path,
        metavar="DIR",
        help="a registry's folder, to be read without a trainer (default: ask the one at "
        "--address)",
    )
    add_address(parser)


@contextmanager
def source(arguments: argparse.Namespace) -> Iterator[Releases]:
    """What the options name, for the length of a ``with`` block."""
    if arguments.registry is not None:
        yield Offline(open_folder(arguments.registry))
    else:
        with trainer(arguments) as stub:
            yield Remote(stub, arguments.timeout)


def find(
    listing: tuple[list[release_pb2.ReleaseManifest], list[release_pb2.ReleaseUse]], version: int
) -> tuple[release_pb2.ReleaseManifest, release_pb2.ReleaseUse]:
    """One release of a listing. Raises RefusedError: it is not there, or damaged."""
    manifests, uses = listing
    use = next((use for use in uses if use.draft_version == version), None)
    if use is None:
        raise RefusedError(
            "draft_version",
            version,
            f"one of {[use.draft_version for use in uses]}",
            "list the releases; old ones are pruned",
            StatusCode.NOT_FOUND,
        )
    if use.damage:
        raise RefusedError(
            f"draft {version}",
            use.damage,
            "a sound release",
            "restore it from a copy",
            StatusCode.DATA_LOSS,
        )
    return next(one for one in manifests if one.draft_version == version), use


def open_folder(root: Path) -> Registry:
    """A registry that is there. Raises RefusedError: no folder, or no release in it."""
    from draft_trainer.releases.registry import Registry

    registry = Registry(root) if root.is_dir() else None
    if registry is None or not registry.versions():
        raise RefusedError(
            "--registry",
            f"{root}, {'without a release' if registry else 'which is no folder'}",
            "a trainer's registry (draft.registry)",
            "check the path",
            StatusCode.NOT_FOUND,
        )
    return registry


class Remote:
    """The releases of a running trainer."""

    def __init__(self, stub: pb_grpc.DraftTrainerStub, timeout: float) -> None:
        self._stub = stub
        self._timeout = timeout

    def listing(self) -> tuple[list[release_pb2.ReleaseManifest], list[release_pb2.ReleaseUse]]:
        """See ``Releases``."""
        answer = self._stub.ListReleases(pb.ListReleasesRequest(), timeout=self._timeout)
        return list(answer.releases), list(answer.uses)

    def tensors(self, version: int) -> tuple[release_pb2.ReleaseManifest, dict[str, Tensor]]:
        """See ``Releases``."""
        from slipstream.tensors import ChunkAssembler

        request = pb.FetchReleaseRequest(draft_version=version)
        answers = self._stub.FetchRelease(request, timeout=self._timeout)
        manifest = next(answers).manifest
        assembler = ChunkAssembler(manifest.tensors, MAX_RELEASE_BYTES)
        for answer in answers:
            assembler.feed(answer.chunk)
        return manifest, assembler.finish()

    def verify(self, version: int) -> None:
        """See ``Releases``; the trainer checks the file, and this what came of it."""
        self.tensors(version)

    def verdicts(self, newest: int) -> list[release_pb2.Verdict]:
        """See ``Releases``."""
        request = pb.ListVerdictsRequest(newest=newest)
        return list(self._stub.ListVerdicts(request, timeout=self._timeout).verdicts)


class Offline:
    """The releases in a folder. Reads only, and needs no lock."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def listing(self) -> tuple[list[release_pb2.ReleaseManifest], list[release_pb2.ReleaseUse]]:
        """See ``Releases``."""
        from draft_trainer.releases.registry import list_uses

        uses = list_uses(self._registry)
        sound = [use.draft_version for use in uses if not use.damage]
        return [self._registry.get(version) for version in sound], uses

    def tensors(self, version: int) -> tuple[release_pb2.ReleaseManifest, dict[str, Tensor]]:
        """See ``Releases``."""
        return self._registry.get(version), self._registry.tensors(version)

    def verify(self, version: int) -> None:
        """See ``Releases``; files that were not released are found as well."""
        self._registry.verify(version)

    def verdicts(self, newest: int) -> list[release_pb2.Verdict]:
        """See ``Releases``."""
        with self._registry.reading() as state:
            return state.gate_results.newest(newest)
