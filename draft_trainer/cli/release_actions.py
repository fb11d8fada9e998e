"""``draft-trainer releases promote | rollback | export | import``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from draft_trainer.cli.releases import (
    List,
    Manifest,
    Reading,
    RegistryFolder,
    Show,
    Verdicts,
    Verify,
    Version,
)
from draft_trainer.cli.trainer import Folder, as_dict, print_json
from slipstream.errors import RefusedError, clean
from slipstream.hub import local_folder
from slipstream.v1 import draft_trainer_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

    from draft_trainer.drafters import Checkpoint

CARD_FILE = "README.md"


@dataclass(frozen=True, kw_only=True)
class Promote(Reading):
    """Stage and commit a release on every rollout server, without the gate.

    If that fails on one server, all go back to the release that they had, and the exit status is 1.
    With --registry, the next trainer on that folder does it.
    """

    version: Version
    """Draft version of the release."""
    pin: bool = False
    """No candidate replaces it until a release is promoted without --pin."""

    def run(self) -> int:
        if self.registry is not None:
            from draft_trainer.releases.pointer import promote_offline

            promote_offline(RegistryFolder(self.registry).registry, self.version, self.pin)
            return _report(pb.PublishResult(draft_version=self.version), self.json)
        request = pb.PromoteReleaseRequest(draft_version=self.version, pin=self.pin)
        with self.trainer() as stub:
            return _report(stub.PromoteRelease(request, timeout=self.timeout), self.json)


@dataclass(frozen=True, kw_only=True)
class Rollback(Reading):
    """Put every rollout server on the newest release before the live one that passed its trial.

    Exit status 1: a server did not follow; the trainer keeps trying (publish.reconcile_s).
    """

    reason: str = ""
    """Reason for the trainer's log."""

    def run(self) -> int:
        if self.registry is not None:
            from draft_trainer.releases.pointer import roll_back_offline

            version = roll_back_offline(RegistryFolder(self.registry).registry, self.reason)
            return _report(pb.PublishResult(draft_version=version), self.json)
        request = pb.RollBackReleaseRequest(reason=self.reason)
        with self.trainer() as stub:
            return _report(stub.RollBackRelease(request, timeout=self.timeout), self.json)


def _report(result: pb.PublishResult, as_json: bool) -> int:
    if as_json:
        print_json(as_dict(result))
    else:
        print(f"the fleet serves draft {result.draft_version}")
        for server in result.servers:
            known = server.HasField("state")
            serves = f"draft {server.state.draft_version}" if known else "unknown"
            error = f"; {clean(server.error)}" if server.error else ""
            print(f"  {clean(server.address)}: {serves}{error}")
    return 1 if any(server.error for server in result.servers) else 0


@dataclass(frozen=True, kw_only=True)
class Export(Reading):
    """Copy a release to a folder, verified, as a checkpoint that vLLM loads.

    Without --layout its manifest goes with it, so that rollout-server --draft knows its version. A
    model card is beside it, so that the folder can be pushed as it is: hf upload ORG/NAME DIR.
    """

    version: Version
    """Draft version of the release."""
    folder: Annotated[Positional[Path], arg(metavar="DIR")]
    """Must not exist."""
    layout: Annotated[
        Literal["plain", "speculators"] | None, arg(help_behavior_hint="(optional)")
    ] = None
    """Write this layout, without the manifest; by default as released."""
    policy: Folder = None
    """The policy's folder, which the speculators layout names."""

    def run(self) -> int:
        from draft_trainer.drafters import DRAFTERS
        from draft_trainer.files import check_free, folder_written_whole
        from draft_trainer.releases.release import kind_of

        check_free(self.folder, "DIR")
        with self.source() as releases:
            manifest, tensors = releases.tensors(self.version)
        with folder_written_whole(self.folder) as target, TemporaryDirectory() as temporary:
            _write_as_released(
                target if self.layout is None else Path(temporary), manifest, tensors
            )
            if self.layout is not None:
                drafter = DRAFTERS[kind_of(manifest)]
                dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
                head = drafter.read(Path(temporary)).draft()
                drafter.save(target, head, dtype, layout=self.layout, policy=self.policy)
            (target / CARD_FILE).write_text(_model_card(manifest))
        layout = self.layout or "as released"
        if self.json:
            told = {"draft_version": manifest.draft_version, "layout": layout}
            print_json({**told, "folder": str(self.folder)})
        else:
            print(f"{self.folder}: draft {manifest.draft_version}, {layout}")
        return 0


def _model_card(manifest: Manifest) -> str:
    """Return a README.md that the Hugging Face hub reads."""
    from draft_trainer.releases.release import kind_of

    tags = ["tags:", "- speculative-decoding", f"- {kind_of(manifest)}"]
    lines = ["---", "library_name: vllm", *tags, "---", ""]
    lines += [f"# Draft {manifest.draft_version} of run {clean(manifest.run_id) or 'unknown'}", ""]
    lines.append("A speculative-decoding draft of Slipstream. It fits one policy and no other.")
    if manifest.HasField("trained_against_policy_version"):
        version = manifest.trained_against_policy_version
        lines.append(f"Trained against policy version {version} of that run.")
    if manifest.HasField("gate"):
        expected = manifest.gate.candidate_acceptance_length
        lines.append(f"Expected acceptance length on held-out prompts: {expected:.2f}.")
    return "\n".join(lines) + "\n"


def _write_as_released(folder: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    from slipstream.checkpoints import WEIGHTS_FILE, write_checkpoint, write_manifest

    write_checkpoint(folder, manifest.config_json, tensors)
    # The same tensors, but the file around them may be some bytes longer or shorter.
    manifest.weights_bytes = (folder / WEIGHTS_FILE).stat().st_size
    write_manifest(folder, manifest)


@dataclass(frozen=True, kw_only=True)
class Import(Reading):
    """Make a release from a draft that was trained elsewhere.

    Reads a checkpoint in the layout of vLLM, SpecForge, speculators or ModelOpt, checks it, and
    sends it to the trainer, which checks it again. The release is not promoted: promote it by its
    number, or let the gate decide with --gate. Exit status 1: it was gated and did not pass.
    """

    folder: Annotated[Positional[Path], arg(metavar="DIR")]
    """The checkpoint, or the name of one on the hub."""
    policy: Folder = None
    """Its policy's folder; needed if the checkpoint does not have all settings."""
    gate: bool = False
    """Measure it on the trainer's held-out states; a pass promotes it."""

    def run(self) -> int:
        from draft_trainer.drafters import DRAFTERS
        from draft_trainer.releases.imports import read_foreign, release_foreign
        from draft_trainer.releases.release import kind_of

        if self.registry is not None and self.gate:
            raise RefusedError(
                "--gate", "--registry", "a running trainer with held-out states", "leave one out"
            )
        with self.source() as releases:
            kind = kind_of(releases.listing()[0][0])
        folder = local_folder(self.folder, "DIR")
        policy = self.policy and local_folder(self.policy, "--policy")
        checkpoint = read_foreign(DRAFTERS[kind], folder, policy)
        if checkpoint.told:
            print(f"{folder}: {checkpoint.told}", file=sys.stderr)
        origin = str(folder.resolve())
        if self.registry is not None:
            registry = RegistryFolder(self.registry).registry
            oldest = registry.drafter.read(registry.path(registry.versions()[0]))
            head = checkpoint.draft_like(oldest)
            manifest = release_foreign(registry, checkpoint, head, origin)
            answer = pb.ImportReleaseResponse(manifest=manifest)
        else:
            requests = _import_requests(checkpoint, origin, self.gate)
            with self.trainer() as stub:
                answer = stub.ImportRelease(requests, timeout=self.timeout)
        version, gated = answer.manifest.draft_version, answer.HasField("verdict")
        if self.json:
            print_json(as_dict(answer))
        elif gated:
            promoted = "promoted" if answer.promoted else "not promoted"
            print(f"draft {version}, {promoted}; {clean(answer.verdict.reason)}")
        else:
            print(
                f"draft {version}, not gated and not promoted; to serve it: "
                f"draft-trainer releases promote {version}"
            )
        return 1 if gated and answer.verdict.outcome != "passed" else 0


def _import_requests(
    checkpoint: Checkpoint, origin: str, gate: bool
) -> Iterator[pb.ImportReleaseRequest]:
    from slipstream.tensors import chunks_of, spec_of

    config_json, tensors = checkpoint.written()
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    header = pb.ImportHeader(
        config_json=config_json,
        tensors=specs,
        origin=origin,
        gate=gate,
        assumed=checkpoint.assumed,
    )
    yield pb.ImportReleaseRequest(header=header)
    for chunk in chunks_of(tensors):
        yield pb.ImportReleaseRequest(chunk=chunk)


@dataclass(frozen=True)
class Releases:
    """Inspect, export and import releases, and select the one that the fleet serves.

    A release is an immutable draft checkpoint in a trainer's registry. The commands ask the trainer
    at the address given with --address. With --registry they use the folder itself.
    """

    action: (
        Annotated[List, subcommand("list")]
        | Annotated[Show, subcommand("show")]
        | Annotated[Verdicts, subcommand("verdicts")]
        | Annotated[Verify, subcommand("verify")]
        | Annotated[Promote, subcommand("promote")]
        | Annotated[Rollback, subcommand("rollback")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Import, subcommand("import")]
    )

    def run(self) -> int:
        """Run the action."""
        return self.action.run()
