"""``draft-trainer releases export``: a copy of a release, as it is or in another layout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft_trainer.cli.output import print_json
from draft_trainer.cli.releases.looking import DRAFT_HELP
from draft_trainer.cli.releases.source import add_source, source

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.v1 import release_pb2


def add_to(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser(
        "export",
        help="copy a release into a folder",
        description="Writes a release, verified, as a checkpoint that vLLM loads. As it is, its "
        "manifest goes with it and rollout-server --draft knows its version.",
    )
    parser.add_argument("version", type=int, metavar="N", help=DRAFT_HELP)
    parser.add_argument("folder", type=Path, metavar="DIR", help="must not exist")
    parser.add_argument(
        "--layout",
        choices=("plain", "speculators"),
        help="write it in this layout (default: as it is, with its manifest)",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="DIR",
        help="the policy's folder, which speculators' layout names",
    )
    parser.add_argument("--json", action="store_true", help="what was written as JSON")
    add_source(parser)
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from draft_trainer.files import check_free, folder_written_whole

    check_free(arguments.folder, "DIR")
    with source(arguments) as releases:
        manifest, tensors = releases.tensors(arguments.version)
    with folder_written_whole(arguments.folder) as temporary:
        if arguments.layout is None:
            _write_as_it_is(temporary, manifest, tensors)
        else:
            _write_in(arguments.layout, arguments.policy, temporary, manifest, tensors)
    layout = arguments.layout or "as released"
    if arguments.json:
        told = {"draft_version": manifest.draft_version, "layout": layout}
        print_json({**told, "folder": str(arguments.folder)})
    else:
        print(f"{arguments.folder}: draft {manifest.draft_version}, {layout}")
    return 0


def _write_as_it_is(
    folder: Path, manifest: release_pb2.ReleaseManifest, tensors: dict[str, Tensor]
) -> None:
    from google.protobuf import json_format
    from safetensors.torch import save_file

    from draft_trainer.checkpoints.draft import CONFIG_FILE, WEIGHTS_FILE
    from draft_trainer.releases.release import MANIFEST_FILE

    (folder / CONFIG_FILE).write_text(manifest.config_json)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)
    # The same tensors; the file around them may be some bytes longer or shorter.
    manifest.weights_bytes = (folder / WEIGHTS_FILE).stat().st_size
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    (folder / MANIFEST_FILE).write_text(text + "\n")


def _write_in(
    layout: str,
    policy: Path | None,
    folder: Path,
    manifest: release_pb2.ReleaseManifest,
    tensors: dict[str, Tensor],
) -> None:
    from tempfile import TemporaryDirectory

    from draft_trainer.drafters import DRAFTERS

    with TemporaryDirectory() as temporary:
        _write_as_it_is(Path(temporary), manifest, tensors)
        head = DRAFTERS["eagle3"].read(Path(temporary)).draft()
    dtype = tensors["fc.weight"].dtype
    DRAFTERS[head.kind].save(folder, head, dtype, layout=layout, policy=policy)
