"""``draft-trainer releases import``: a draft that somebody else trained becomes a release."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft_trainer.cli.output import as_dict, print_json
from draft_trainer.cli.releases.source import add_source, open_folder
from draft_trainer.cli.trainer import trainer
from slipstream.errors import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb

if TYPE_CHECKING:
    from draft_trainer.drafters import DraftCheckpoint


def add_to(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser(
        "import",
        help="make a draft that somebody else trained a release",
        description="Reads a checkpoint here, in the layout of vLLM, SpecForge, speculators or "
        "ModelOpt, checks it, and sends it to the trainer, which checks it again and makes it a "
        "release. It is not promoted by that: promote it by its number, or let the gate decide "
        "with --gate. Exit status 1: it was gated and did not pass.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the checkpoint")
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="DIR",
        help="its policy's folder; needed where the checkpoint does not say everything",
    )
    parser.add_argument(
        "--gate",
        action="store_true",
        help="judge it on the trainer's held-out states; a pass promotes it",
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    add_source(parser)
    parser.set_defaults(run=_import)


def _import(arguments: argparse.Namespace) -> int:
    from draft_trainer.drafters import DRAFTERS
    from draft_trainer.releases.imports import read_foreign

    if arguments.registry is not None and arguments.gate:
        raise RefusedError(
            "--gate",
            "--registry",
            "a running trainer, which has the states to judge it on",
            "leave one of them out",
        )
    checkpoint = read_foreign(DRAFTERS["eagle3"], arguments.folder, arguments.policy)
    origin = str(arguments.folder.resolve())
    if arguments.registry is not None:
        answer = _into_folder(checkpoint, origin, arguments.registry)
    else:
        with trainer(arguments) as stub:
            requests = _requests(checkpoint, origin, arguments.gate)
            answer = stub.ImportRelease(requests, timeout=arguments.timeout)
    if arguments.json:
        print_json(as_dict(answer))
    else:
        print(_told(answer))
    return 1 if answer.HasField("verdict") and answer.verdict.outcome != "passed" else 0


def _told(answer: pb.ImportReleaseResponse) -> str:
    version = answer.manifest.draft_version
    if not answer.HasField("verdict"):
        return (
            f"draft {version}, not gated and not promoted; to serve it: "
            f"draft-trainer releases promote {version}"
        )
    fate = "promoted" if answer.promoted else "not promoted"
    return f"draft {version}, {fate}; {answer.verdict.reason}"


def _into_folder(checkpoint: DraftCheckpoint, origin: str, root: Path) -> pb.ImportReleaseResponse:
    from draft_trainer.releases.imports import release_foreign

    registry = open_folder(root)
    oldest = registry.drafter.read(registry.path(registry.versions()[0]))
    head = checkpoint.draft_like(oldest)
    return pb.ImportReleaseResponse(manifest=release_foreign(registry, checkpoint, head, origin))


def _requests(
    checkpoint: DraftCheckpoint, origin: str, gate: bool
) -> Iterator[pb.ImportReleaseRequest]:
    from tempfile import TemporaryDirectory

    from draft_trainer.checkpoints.draft import CONFIG_FILE, load_tensors
    from slipstream.tensors import chunks_of, spec_of

    with TemporaryDirectory() as temporary:
        checkpoint.write(Path(temporary))
        tensors = load_tensors(Path(temporary))
        config_json = (Path(temporary) / CONFIG_FILE).read_text()
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    header = pb.ImportHeader(config_json=config_json, tensors=specs, origin=origin, gate=gate)
    chunks = (pb.ImportReleaseRequest(chunk=chunk) for chunk in chunks_of(tensors))
    return chain([pb.ImportReleaseRequest(header=header)], chunks)
