"""``draft-trainer releases diff``: which tensors of two releases differ, and how far."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draft_trainer.cli.output import as_dict, print_json, print_table
from draft_trainer.cli.releases.looking import DRAFT_HELP, described
from draft_trainer.cli.releases.source import add_source, source

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.v1 import release_pb2


@dataclasses.dataclass(frozen=True)
class TensorDiff:
    """How one tensor moved from release A to release B.

    Attributes:
        name: of the parameter.
        elements: in it.
        changed: elements that differ.
        relative: norm of the difference over the norm of A's; None where A's is 0, or where the
            tensor is only in one of them or of another shape.
        largest: greatest absolute difference of an element; None likewise.
        note: why there are no figures; empty where there are.
    """

    name: str
    elements: int
    changed: int
    relative: float | None
    largest: float | None
    note: str = ""


def add_to(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser(
        "diff",
        help="what changed from one release to another",
        description="Compares two releases: manifests and gate figures side by side, then every "
        "tensor that differs, by the norm of its change relative to its own and by its largest "
        "change. Both are verified on the way.",
    )
    parser.add_argument("a", type=int, metavar="A", help=DRAFT_HELP + " to compare from")
    parser.add_argument("b", type=int, metavar="B", help=DRAFT_HELP + " to compare with it")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    add_source(parser)
    parser.set_defaults(run=_diff)


def tensor_diffs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[TensorDiff]:
    """Every tensor that is in either, by name.

    Args:
        a: parameters by name, any shape and dtype.
        b: likewise.
    """
    return [_tensor_diff(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys())]


def _tensor_diff(name: str, a: Tensor | None, b: Tensor | None) -> TensorDiff:
    if a is None or b is None:
        held = b if a is None else a
        assert held is not None
        note = f"only in {'B' if a is None else 'A'}"
        return TensorDiff(name, held.numel(), held.numel(), None, None, note)
    if a.shape != b.shape:
        note = f"{list(a.shape)} against {list(b.shape)}"
        return TensorDiff(name, b.numel(), b.numel(), None, None, note)
    if not a.numel():
        return TensorDiff(name, 0, 0, None, None, "empty")
    difference = b.double() - a.double()
    norm = float(a.double().norm())
    return TensorDiff(
        name,
        a.numel(),
        int((difference != 0).sum()),
        float(difference.norm()) / norm if norm else None,
        float(difference.abs().max()),
    )


def _diff(arguments: argparse.Namespace) -> int:
    with source(arguments) as releases:
        manifest_a, tensors_a = releases.tensors(arguments.a)
        manifest_b, tensors_b = releases.tensors(arguments.b)
    diffs = tensor_diffs(tensors_a, tensors_b)
    if arguments.json:
        print_json(
            {
                "a": as_dict(manifest_a),
                "b": as_dict(manifest_b),
                "tensors": [dataclasses.asdict(diff) for diff in diffs],
            }
        )
        return 0
    _print(manifest_a, manifest_b, diffs)
    return 0


def _print(
    a: release_pb2.ReleaseManifest, b: release_pb2.ReleaseManifest, diffs: list[TensorDiff]
) -> None:
    ours, theirs = described(a), described(b)
    rows: list[list[object]] = [[" ", "A ", "B "]]
    rows += [
        [name, ours.get(name, "-"), theirs.get(name, "-")] for name in dict.fromkeys(ours | theirs)
    ]
    rows.append(["config.json", "", "the same" if a.config_json == b.config_json else "differs"])
    print_table(rows)
    changed = [diff for diff in diffs if diff.changed]
    print()
    if changed:
        head = ["changed tensor ", "elements", "changed", "relative norm", "largest", " "]
        print_table([head, *(_row(diff) for diff in changed)])
    print(f"{len(changed)} of {len(diffs)} tensors differ")


def _row(diff: TensorDiff) -> list[object]:
    def known(value: float | None) -> str:
        return "-" if value is None else f"{value:.3e}"

    share = f"{diff.changed / max(diff.elements, 1):.1%}"
    cells = [diff.name, diff.elements, share, known(diff.relative), known(diff.largest)]
    return [*cells, diff.note]
