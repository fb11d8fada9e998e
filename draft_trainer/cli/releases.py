"""``draft-trainer releases list | show | verdicts | verify``.

They ask the trainer at --address, or read a registry's folder with --registry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
from tyro.conf import Positional, arg

from draft_trainer.cli.trainer import (
    Connection,
    Folder,
    as_dict,
    at_least,
    mebibytes,
    print_json,
    print_table,
    when,
)
from slipstream.errors import RefusedError, StatusCode, clean, refused_from
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2, tensor_pb2
from slipstream.v1.console_pb2 import GetHistoryRequest

if TYPE_CHECKING:
    from torch import Tensor

    from draft_trainer.releases.registry import Listing, Registry

MAX_RELEASE_BYTES = 64 << 30
"""Bound on a release that is fetched; far beyond any draft head."""

Version = Annotated[Positional[int], arg(metavar="N")]
Manifest = release_pb2.ReleaseManifest


class RunningTrainer:
    """The releases of a running trainer. Calls raise RefusedError: no such release, or damaged."""

    def __init__(self, stub: pb_grpc.DraftTrainerStub, timeout: float) -> None:
        self._stub = stub
        self._timeout = timeout

    def listing(self) -> Listing:
        answer = self._stub.ListReleases(pb.ListReleasesRequest(), timeout=self._timeout)
        return list(answer.releases), list(answer.uses)

    def tensors(self, version: int) -> tuple[Manifest, dict[str, Tensor]]:
        """Fetch a release. The trainer checks the files, this side the tensors that arrive."""
        from slipstream.tensors import ChunkAssembler

        request = pb.FetchReleaseRequest(draft_version=version)
        answers = self._stub.FetchRelease(request, timeout=self._timeout)
        manifest = next(answers).manifest
        assembler = ChunkAssembler(manifest.tensors, MAX_RELEASE_BYTES)
        for answer in answers:
            assembler.feed(answer.chunk)
        return manifest, assembler.finish()

    def verify(self, version: int) -> None:
        """Check every byte of a release. Raises RefusedError: damaged, or removed meanwhile."""
        try:
            self.tensors(version)
        except grpc.RpcError as error:
            refused = refused_from(error)
            if refused is None or refused.code not in (StatusCode.DATA_LOSS, StatusCode.NOT_FOUND):
                raise
            raise refused from error

    def verdicts(self, newest: int) -> list[release_pb2.Verdict]:
        """Return the newest gate results (0: all that are kept), oldest first."""
        history = self._stub.GetHistory(GetHistoryRequest(), timeout=self._timeout)
        return list(history.verdicts)[-newest:]


class RegistryFolder:
    """The releases in a registry's folder, asked as ``RunningTrainer`` is; needs no lock.

    Raises RefusedError: no folder, or no release in it.
    """

    def __init__(self, root: Path) -> None:
        from draft_trainer.releases.registry import Registry

        registry = Registry(root) if root.is_dir() else None
        if registry is None or not registry.versions():
            found = f"{root}, {'without a release' if registry else 'which is no folder'}"
            expected, code = "a trainer's registry (draft.registry)", StatusCode.NOT_FOUND
            raise RefusedError("--registry", found, expected, "check the path", code)
        self.registry: Registry = registry

    def listing(self) -> Listing:
        return self.registry.uses()

    def tensors(self, version: int) -> tuple[Manifest, dict[str, Tensor]]:
        return self.registry.get(version), self.registry.tensors(version)

    def verify(self, version: int) -> None:
        self.registry.verify(version)

    def verdicts(self, newest: int) -> list[release_pb2.Verdict]:
        with self.registry.reading() as state:
            return state.gate_results.newest(newest)


@dataclass(frozen=True, kw_only=True)
class Reading(Connection):
    """Options of a command that reads releases."""

    registry: Folder = None
    """A registry's folder, to use directly instead of asking a trainer."""
    json: bool = False
    """Everything as JSON."""

    @contextmanager
    def source(self) -> Iterator[RunningTrainer | RegistryFolder]:
        """Yield the releases that the options name, for the length of a ``with`` block."""
        if self.registry is not None:
            yield RegistryFolder(self.registry)
        else:
            with self.trainer() as stub:
                yield RunningTrainer(stub, self.timeout)


@dataclass(frozen=True, kw_only=True)
class List(Reading):
    """List the releases that are kept, oldest first.

    Shows the source of each, the gate's result (expected acceptance length, gain over the release
    that it was compared with), its size, and why retention keeps it.
    """

    def run(self) -> int:
        with self.source() as releases:
            manifests, uses = releases.listing()
        known = {manifest.draft_version: manifest for manifest in manifests}
        if self.json:
            found = [(known.get(u.draft_version, Manifest()), u) for u in uses]
            print_json([{**as_dict(manifest), "use": as_dict(use)} for manifest, use in found])
            return 0
        rows: list[list[object]] = [
            ["draft", "source ", "parent", "policy", "length", "gain ", "MiB", "kept as "]
        ]
        for use in uses:
            manifest = known.get(use.draft_version)
            cells = ["DAMAGED", *"----"] if manifest is None else _cells(manifest)
            kept = ", ".join(use.kept_as) or "-"
            rows.append([use.draft_version, *cells, mebibytes(use.bytes), kept])
        print_table(rows)
        for use in uses:
            if use.draft_version not in known:
                print(f"draft {use.draft_version}: {clean(use.damage)}")
        return 0


def _cells(manifest: Manifest) -> list[object]:
    gate = manifest.gate if manifest.HasField("gate") else None
    return [
        _source_name(manifest),
        _optional(manifest, "parent_version"),
        _optional(manifest, "trained_against_policy_version"),
        f"{gate.candidate_acceptance_length:.3f}" if gate else "-",
        _gain(gate) if gate else "not gated",
    ]


def _optional(message: Any, name: str) -> object:
    return getattr(message, name) if message.HasField(name) else "-"


def _source_name(manifest: Manifest) -> str:
    name = release_pb2.ReleaseSource.Name(manifest.source)
    return name.removeprefix("RELEASE_SOURCE_").lower()


def _gain(gate: release_pb2.GateFigures) -> str:
    return f"{gate.difference:+.3f} ± {gate.difference_half_width:.3f}"


@dataclass(frozen=True, kw_only=True)
class Show(Reading):
    """Show everything that is known of one release: its manifest and its tensors."""

    version: Version
    """Draft version of the release."""

    def run(self) -> int:
        with self.source() as releases:
            manifests, uses = releases.listing()
        use = next((use for use in uses if use.draft_version == self.version), None)
        if use is None:
            expected, code = f"one of {[u.draft_version for u in uses]}", StatusCode.NOT_FOUND
            next_step = "list the releases; old ones are pruned"
            raise RefusedError("draft_version", self.version, expected, next_step, code)
        if use.damage:
            field, code = f"draft {self.version}", StatusCode.DATA_LOSS
            raise RefusedError(field, use.damage, "no damage", "restore a copy", code)
        manifest = next(one for one in manifests if one.draft_version == self.version)
        if self.json:
            print_json({**as_dict(manifest), "use": as_dict(use)})
            return 0
        for name, text in _described(manifest).items():
            print(f"{name:24}{text}")
        print(f"{'kept as':24}{', '.join(use.kept_as) or '-'}\n")
        rows: list[list[object]] = [["tensor ", "type ", "shape ", "MiB", "sha256 "]]
        for spec in manifest.tensors:
            dtype = tensor_pb2.DType.Name(spec.dtype).removeprefix("DTYPE_").lower()
            shape = " x ".join(map(str, spec.shape))
            size = mebibytes(math.prod(spec.shape) * _BYTES[dtype])
            rows.append([clean(spec.name), dtype, shape, size, spec.sha256.hex()[:16]])
        print_table(rows)
        return 0


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


def _described(manifest: Manifest) -> dict[str, str]:
    gate = manifest.gate if manifest.HasField("gate") else None
    described = {
        "draft": str(manifest.draft_version),
        "source": _source_name(manifest),
        "parent": str(_optional(manifest, "parent_version")),
        "run": clean(manifest.run_id) or "-",
        "trained against policy": str(_optional(manifest, "trained_against_policy_version")),
        "TTT depth": str(manifest.ttt_steps or "-"),
        "served draft length": str(manifest.num_speculative_tokens or "-"),
        "drafting": manifest.draft_sample_method or "-",
        "made": when(manifest.created_at),
        "code": manifest.code_version,
        "origin": clean(manifest.origin) or "-",
        "assumed": clean("; ".join(manifest.assumed)) or "-",
        "weights": f"{mebibytes(manifest.weights_bytes)} MiB, {len(manifest.tensors)} tensors",
        "gate": "not gated" if gate is None else "passed" if gate.passed else "not passed",
    }
    if gate is not None:
        described |= {
            "acceptance length": f"{gate.candidate_acceptance_length:.4f}",
            "incumbent's": f"{gate.incumbent_acceptance_length:.4f}",
            "gain": f"{_gain(gate)} ({gate.confidence:.0%})",
            "had to exceed": f"{gate.min_gain:g}",
            "measured on": f"{gate.prompts} prompts, {gate.anchors} anchors",
        }
        for span in gate.by_position:
            ours, theirs = span.candidate_acceptance_length, span.incumbent_acceptance_length
            described[f"from position {span.first_position}"] = f"{ours:.3f} against {theirs:.3f}"
    return described


@dataclass(frozen=True, kw_only=True)
class Verdicts(Reading):
    """Show what the gate decided, oldest first, dropped candidates too. The newest 500 are kept."""

    newest: Annotated[int, arg(metavar="N")] = 20
    """Number of decisions; 0: all that are kept."""

    def run(self) -> int:
        at_least("--newest", self.newest, 0)
        with self.source() as releases:
            verdicts = releases.verdicts(self.newest)
        if self.json:
            print_json([as_dict(verdict) for verdict in verdicts])
            return 0
        rows: list[list[object]] = [
            ["judged ", "verdict ", "draft", "against", "policy", "reason "]
        ]
        for verdict in verdicts:
            draft = _optional(verdict, "draft_version")
            policy = _optional(verdict, "trained_against_policy_version")
            cells = [when(verdict.judged_at), verdict.outcome, draft, verdict.incumbent_version]
            rows.append([*cells, policy, clean(verdict.reason)])
        print_table(rows)
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify(Reading):
    """Check every byte of releases against their manifests.

    Names, config.json, sizes and every tensor's SHA-256. Exit status 1: a release is damaged.
    """

    versions: Annotated[Positional[tuple[int, ...]], arg(metavar="[N ...]")] = ()
    """Draft versions; all by default."""

    def run(self) -> int:
        damage: dict[int, str] = {}
        with self.source() as releases:
            for version in self.versions or [u.draft_version for u in releases.listing()[1]]:
                damage[version] = ""
                try:
                    releases.verify(version)
                except RefusedError as error:
                    damage[version] = str(error)
        if self.json:
            print_json([{"draft_version": v, "damage": text} for v, text in damage.items()])
        else:
            for version, text in damage.items():
                print(f"draft {version}: {text or 'ok'}")
        return 1 if any(damage.values()) else 0
