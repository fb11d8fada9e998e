"""``draft-trainer releases list | show | verdicts``."""

from __future__ import annotations

import argparse
import math
from typing import Any

from draft_trainer.cli.output import as_dict, mebibytes, print_json, print_table, when
from draft_trainer.cli.releases.source import add_source, find, source
from slipstream.v1 import release_pb2, tensor_pb2

DRAFT_HELP = "draft version of the release"


def add_to(actions: Any) -> None:
    """Register the commands."""
    listing = actions.add_parser(
        "list",
        help="every release that is kept, oldest first",
        description="Lists releases, oldest first: where each comes from, what the gate found "
        "(expected acceptance length, gain over the release it had to beat), its size, and why "
        "retention spares it.",
    )
    listing.set_defaults(run=_list)
    show = actions.add_parser(
        "show",
        help="everything that is known of one release",
        description="Prints a release's manifest and its tensors.",
    )
    show.add_argument("version", type=int, metavar="N", help=DRAFT_HELP)
    show.set_defaults(run=_show)
    verdicts = actions.add_parser(
        "verdicts",
        help="what the gate decided, on dropped candidates too",
        description="Lists the gate's verdicts, oldest first. The newest 500 are kept.",
    )
    verdicts.add_argument(
        "--newest", type=_count, default=20, metavar="N", help="so many (default: 20; 0: all kept)"
    )
    verdicts.set_defaults(run=_verdicts)
    for parser in (listing, show, verdicts):
        parser.add_argument("--json", action="store_true", help="everything as JSON")
        add_source(parser)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def source_name(manifest: release_pb2.ReleaseManifest) -> str:
    """Where a release comes from, in a word."""
    name = release_pb2.ReleaseSource.Name(manifest.source)
    return name.removeprefix("RELEASE_SOURCE_").lower()


def gain(gate: release_pb2.GateFigures) -> str:
    """The gate's difference with its interval."""
    return f"{gate.difference:+.3f} ± {gate.difference_half_width:.3f}"


def _list(arguments: argparse.Namespace) -> int:
    with source(arguments) as releases:
        manifests, uses = releases.listing()
    by_version = {manifest.draft_version: manifest for manifest in manifests}
    if arguments.json:
        print_json(
            [
                {**as_dict(by_version.get(u.draft_version, _nothing(u))), "use": as_dict(u)}
                for u in uses
            ]
        )
        return 0
    rows: list[list[object]] = [
        ["draft", "source ", "parent", "policy", "length", "gain ", "MiB", "kept as "]
    ]
    damage = []
    for use in uses:
        kept = ", ".join(use.kept_as) or "-"
        if use.draft_version in by_version:
            cells = _cells(by_version[use.draft_version])
        else:
            cells = ["DAMAGED", "-", "-", "-", "-"]
            damage.append(f"draft {use.draft_version}: {use.damage}")
        rows.append([use.draft_version, *cells, mebibytes(use.bytes), kept])
    print_table(rows)
    for line in damage:
        print(line)
    return 0


def _nothing(use: release_pb2.ReleaseUse) -> release_pb2.ReleaseManifest:
    return release_pb2.ReleaseManifest(draft_version=use.draft_version)


def _cells(manifest: release_pb2.ReleaseManifest) -> list[object]:
    gated, known = manifest.HasField("gate"), "trained_against_policy_version"
    return [
        source_name(manifest),
        manifest.parent_version if manifest.HasField("parent_version") else "-",
        manifest.trained_against_policy_version if manifest.HasField(known) else "-",  # type: ignore[arg-type]
        f"{manifest.gate.candidate_acceptance_length:.3f}" if gated else "-",
        gain(manifest.gate) if gated else "not gated",
    ]


def _show(arguments: argparse.Namespace) -> int:
    with source(arguments) as releases:
        manifest, use = find(releases.listing(), arguments.version)
    if arguments.json:
        print_json({**as_dict(manifest), "use": as_dict(use)})
        return 0
    for name, text in described(manifest).items():
        print(f"{name:24}{text}")
    print(f"{'kept as':24}{', '.join(use.kept_as) or '-'}")
    rows: list[list[object]] = [["tensor ", "type ", "shape ", "MiB", "sha256 "]]
    for spec in manifest.tensors:
        dtype = tensor_pb2.DType.Name(spec.dtype).removeprefix("DTYPE_").lower()
        shape = " x ".join(map(str, spec.shape))
        rows.append([spec.name, dtype, shape, mebibytes(_size(spec)), spec.sha256.hex()[:16]])
    print()
    print_table(rows)
    return 0


def described(manifest: release_pb2.ReleaseManifest) -> dict[str, str]:
    """A manifest for people, without config.json and tensors."""
    gate = manifest.gate if manifest.HasField("gate") else None
    against = manifest.HasField("trained_against_policy_version")
    k = manifest.num_speculative_tokens
    described = {
        "draft": str(manifest.draft_version),
        "source": source_name(manifest),
        "parent": str(manifest.parent_version) if manifest.HasField("parent_version") else "-",
        "run": manifest.run_id or "-",
        "trained against policy": (
            str(manifest.trained_against_policy_version) if against else "-"
        ),
        "TTT depth": str(manifest.ttt_steps or "-"),
        "served draft length": str(k or "-"),
        "drafting": manifest.draft_sample_method or "-",
        "made": when(manifest.created_at),
        "code": manifest.code_version,
        "origin": manifest.origin or "-",
        "weights": f"{mebibytes(manifest.weights_bytes)} MiB, {len(manifest.tensors)} tensors",
        "gate": "not gated" if gate is None else "passed" if gate.passed else "not passed",
    }
    if gate is not None:
        described |= {
            "acceptance length": f"{gate.candidate_acceptance_length:.4f}",
            "incumbent's": f"{gate.incumbent_acceptance_length:.4f}",
            "gain": f"{gain(gate)} ({gate.confidence:.0%})",
            "had to exceed": f"{gate.min_gain:g}",
            "measured on": f"{gate.prompts} prompts, {gate.anchors} anchors",
        }
    return described


def _size(spec: tensor_pb2.TensorSpec) -> int:
    widths = {"FLOAT32": 4, "BFLOAT16": 2, "FLOAT16": 2, "INT64": 8, "INT32": 4, "BOOL": 1}
    return math.prod(spec.shape) * widths[tensor_pb2.DType.Name(spec.dtype).removeprefix("DTYPE_")]


def _verdicts(arguments: argparse.Namespace) -> int:
    with source(arguments) as releases:
        verdicts = releases.verdicts(arguments.newest)
    if arguments.json:
        print_json([as_dict(verdict) for verdict in verdicts])
        return 0
    rows: list[list[object]] = [["judged ", "verdict ", "draft", "against", "policy", "reason "]]
    for v in verdicts:
        policy = "trained_against_policy_version"
        rows.append(
            [
                when(v.judged_at),
                v.outcome,
                v.draft_version if v.HasField("draft_version") else "-",
                v.incumbent_version,
                v.trained_against_policy_version if v.HasField(policy) else "-",  # type: ignore[arg-type]
                v.reason,
            ]
        )
    print_table(rows)
    return 0
