"""``draft-trainer releases list | show | verdicts | diff | verify``.

They ask the trainer at --address, or read a registry's folder with --registry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from draft_trainer.cli.trainer import (
    Connection,
    as_dict,
    at_least,
    mebibytes,
    plain,
    print_json,
    print_table,
    when,
)
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2, tensor_pb2

if TYPE_CHECKING:
    from torch import Tensor

    from draft_trainer.releases.registry import Registry

MAX_RELEASE_BYTES = 64 << 30
"""Bound on a release that is fetched; far beyond any draft head."""

Version = Annotated[Positional[int], arg(metavar="N")]
Folder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(optional)")]
Manifest = release_pb2.ReleaseManifest
Listing = tuple[list[Manifest], list[release_pb2.ReleaseUse]]


class RunningTrainer:
    """The releases of a running trainer.

    ``listing``: the manifests that can be read, and the use of every release; oldest first.
    ``tensors``: one release, every tensor verified; RefusedError: none, or it is damaged.
    ``verify``: everything of a release; RefusedError with what differs.
    ``verdicts``: the newest gate results (0: all that are kept), oldest first.
    """

    def __init__(self, stub: pb_grpc.DraftTrainerStub, timeout: float) -> None:
        self._stub = stub
        self._timeout = timeout

    def listing(self) -> Listing:
        answer = self._stub.ListReleases(pb.ListReleasesRequest(), timeout=self._timeout)
        return list(answer.releases), list(answer.uses)

    def tensors(self, version: int) -> tuple[Manifest, dict[str, Tensor]]:
        from slipstream.tensors import ChunkAssembler

        request = pb.FetchReleaseRequest(draft_version=version)
        answers = self._stub.FetchRelease(request, timeout=self._timeout)
        manifest = next(answers).manifest
        assembler = ChunkAssembler(manifest.tensors, MAX_RELEASE_BYTES)
        for answer in answers:
            assembler.feed(answer.chunk)
        return manifest, assembler.finish()

    def verify(self, version: int) -> None:
        # The trainer checks the files, this side the tensors that arrive.
        self.tensors(version)

    def verdicts(self, newest: int) -> list[release_pb2.Verdict]:
        request = pb.ListVerdictsRequest(newest=newest)
        return list(self._stub.ListVerdicts(request, timeout=self._timeout).verdicts)


class RegistryFolder:
    """The releases in a registry's folder, asked as ``RunningTrainer`` is.

    Only reads, so it needs no lock.

    Raises:
        RefusedError: no folder, or no release in it.
    """

    def __init__(self, root: Path) -> None:
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
        self.registry: Registry = registry

    def listing(self) -> Listing:
        from draft_trainer.releases.registry import list_uses

        uses = list_uses(self.registry)
        sound = [use.draft_version for use in uses if not use.damage]
        return [self.registry.get(version) for version in sound], uses

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
    """A registry's folder, to be read without a trainer."""
    json: bool = False
    """Everything as JSON."""

    @contextmanager
    def source(self) -> Iterator[RunningTrainer | RegistryFolder]:
        """What the options name, for the length of a ``with`` block."""
        if self.registry is not None:
            yield RegistryFolder(self.registry)
        else:
            with self.trainer() as stub:
                yield RunningTrainer(stub, self.timeout)


@dataclass(frozen=True, kw_only=True)
class List(Reading):
    """Every release that is kept, oldest first.

    Where each comes from, what the gate found (expected acceptance length, gain over the release it
    had to beat), its size, and why retention keeps it.
    """

    def run(self) -> int:
        with self.source() as releases:
            manifests, uses = releases.listing()
        known = {manifest.draft_version: manifest for manifest in manifests}
        if self.json:
            described = [
                known.get(v, Manifest(draft_version=v)) for v in (u.draft_version for u in uses)
            ]
            pairs = zip(described, uses, strict=True)
            print_json([{**as_dict(manifest), "use": as_dict(use)} for manifest, use in pairs])
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
                print(f"draft {use.draft_version}: {plain(use.damage)}")
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
    """Everything that is known of one release: its manifest and its tensors."""

    version: Version
    """Draft version of the release."""

    def run(self) -> int:
        with self.source() as releases:
            manifest, use = _find(releases.listing(), self.version)
        if self.json:
            print_json({**as_dict(manifest), "use": as_dict(use)})
            return 0
        for name, text in _described(manifest).items():
            print(f"{name:24}{text}")
        print(f"{'kept as':24}{', '.join(use.kept_as) or '-'}")
        rows: list[list[object]] = [["tensor ", "type ", "shape ", "MiB", "sha256 "]]
        for spec in manifest.tensors:
            dtype = tensor_pb2.DType.Name(spec.dtype).removeprefix("DTYPE_").lower()
            shape = " x ".join(map(str, spec.shape))
            size = mebibytes(_bytes_of(spec))
            rows.append([plain(spec.name), dtype, shape, size, spec.sha256.hex()[:16]])
        print()
        print_table(rows)
        return 0


def _find(listing: Listing, version: int) -> tuple[Manifest, release_pb2.ReleaseUse]:
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
            f"draft {version}", use.damage, "no damage", "restore a copy", StatusCode.DATA_LOSS
        )
    return next(one for one in manifests if one.draft_version == version), use


def _described(manifest: Manifest) -> dict[str, str]:
    gate = manifest.gate if manifest.HasField("gate") else None
    described = {
        "draft": str(manifest.draft_version),
        "source": _source_name(manifest),
        "parent": str(_optional(manifest, "parent_version")),
        "run": plain(manifest.run_id) or "-",
        "trained against policy": str(_optional(manifest, "trained_against_policy_version")),
        "TTT depth": str(manifest.ttt_steps or "-"),
        "served draft length": str(manifest.num_speculative_tokens or "-"),
        "drafting": manifest.draft_sample_method or "-",
        "made": when(manifest.created_at),
        "code": manifest.code_version,
        "origin": plain(manifest.origin) or "-",
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
    return described


def _bytes_of(spec: tensor_pb2.TensorSpec) -> int:
    widths = {"FLOAT32": 4, "BFLOAT16": 2, "FLOAT16": 2, "INT64": 8, "INT32": 4, "BOOL": 1}
    return math.prod(spec.shape) * widths[tensor_pb2.DType.Name(spec.dtype).removeprefix("DTYPE_")]


@dataclass(frozen=True, kw_only=True)
class Verdicts(Reading):
    """What the gate decided, on dropped candidates too, oldest first. The newest 500 are kept."""

    newest: Annotated[int, arg(metavar="N")] = 20
    """So many; 0: all that are kept."""

    def run(self) -> int:
        at_least("--newest", self.newest, 0)
        with self.source() as releases:
            verdicts = releases.verdicts(self.newest)
        if self.json:
            print_json([as_dict(verdict) for verdict in verdicts])
            return 0
        head = ["judged ", "verdict ", "draft", "against", "policy", "reason "]
        rows: list[list[object]] = [
            [
                when(verdict.judged_at),
                verdict.outcome,
                _optional(verdict, "draft_version"),
                verdict.incumbent_version,
                _optional(verdict, "trained_against_policy_version"),
                plain(verdict.reason),
            ]
            for verdict in verdicts
        ]
        print_table([head, *rows])
        return 0


@dataclass(frozen=True, kw_only=True)
class Diff(Reading):
    """What changed from one release to another.

    Manifests and gate figures side by side, then every tensor that differs, by the norm of its
    change relative to its own and by its largest change. Both releases are verified.
    """

    a: Annotated[Positional[int], arg(metavar="A")]
    """Draft version to compare from."""
    b: Annotated[Positional[int], arg(metavar="B")]
    """Draft version to compare with it."""

    def run(self) -> int:
        with self.source() as releases:
            manifest_a, tensors_a = releases.tensors(self.a)
            manifest_b, tensors_b = releases.tensors(self.b)
        diffs = tensor_diffs(tensors_a, tensors_b)
        if self.json:
            print_json({"a": as_dict(manifest_a), "b": as_dict(manifest_b), "tensors": diffs})
            return 0
        ours, theirs = _described(manifest_a), _described(manifest_b)
        same = manifest_a.config_json == manifest_b.config_json
        rows: list[list[object]] = [[" ", "A ", "B "]]
        rows += [
            [name, ours.get(name, "-"), theirs.get(name, "-")]
            for name in dict.fromkeys(ours | theirs)
        ]
        print_table([*rows, ["config.json", "", "the same" if same else "differs"]])
        print()
        changed = [diff for diff in diffs if diff["changed"]]
        if changed:
            head = ["changed tensor ", "elements", "changed", "relative norm", "largest", " "]
            print_table([head, *(_row(diff) for diff in changed)])
        print(f"{len(changed)} of {len(diffs)} tensors differ")
        return 0


def tensor_diffs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """How every tensor that is in either release changed, by name.

    Returns:
        For each: ``name``; its ``elements`` and how many ``changed``; ``relative``, the norm of the
        difference over the norm of A's, and ``largest``, the greatest absolute difference, both
        None where they cannot be told; ``note``, why not.
    """
    return [_tensor_diff(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys())]


def _tensor_diff(name: str, a: Tensor | None, b: Tensor | None) -> dict[str, Any]:
    relative = largest = None
    held = b if b is not None else a
    assert held is not None
    elements = changed = held.numel()
    note = ""
    if a is None or b is None:
        note = f"only in {'B' if a is None else 'A'}"
    elif a.shape != b.shape:
        note = f"{list(a.shape)} against {list(b.shape)}"
    elif not elements:
        note = "empty"
    else:
        difference, norm = b.double() - a.double(), float(a.double().norm())
        changed = int((difference != 0).sum())
        relative = float(difference.norm()) / norm if norm else None
        largest = float(difference.abs().max())
    sizes = {"elements": elements, "changed": changed}
    return {"name": name, **sizes, "relative": relative, "largest": largest, "note": note}


def _row(diff: Mapping[str, Any]) -> list[object]:
    def known(value: float | None) -> str:
        return "-" if value is None else f"{value:.3e}"

    share = f"{diff['changed'] / max(diff['elements'], 1):.1%}"
    cells = [plain(diff["name"]), diff["elements"], share]
    return [*cells, known(diff["relative"]), known(diff["largest"]), diff["note"]]


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
            versions = self.versions or [use.draft_version for use in releases.listing()[1]]
            for version in versions:
                damage[version] = ""
                try:
                    releases.verify(version)
                except RefusedError as error:
                    damage[version] = str(error)
        if self.json:
            print_json([{"draft_version": v, "damage": text} for v, text in damage.items()])
        else:
            for version, text in damage.items():
                print(f"draft {version}: {text or 'sound'}")
        return 1 if any(damage.values()) else 0
