"""``draft-trainer``: run the trainer, ask a running one, or make a draft offline."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from draft_trainer.cli import fit, init, serve
from slipstream.channel import open_channel
from slipstream.refusal import RefusedError, refused_from
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

FAILED, REFUSED = 1, 2
DEFAULT_ADDRESS = "127.0.0.1:50051"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: it failed on the way; 2: refused, with the reason on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except RefusedError as error:
        print(f"draft-trainer: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(
            f"draft-trainer: {error}. Next step: see that the folder can be written and the disk "
            "has room, then run it again (fit: with --resume)",
            file=sys.stderr,
        )
        return FAILED
    except grpc.RpcError as error:
        print(f"draft-trainer: {_explain(error, arguments.address)}", file=sys.stderr)
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draft-trainer",
        description="Trains an EAGLE-3 draft head on a moving policy's states and publishes it.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve.add_to(commands)
    init.add_to(commands)
    fit.add_to(commands)
    status = commands.add_parser("status", help="where a running trainer stands")
    status.add_argument("--json", action="store_true", help="the whole status as JSON")
    _add_address(status)
    status.set_defaults(run=_status)
    releases = commands.add_parser("releases", help="look at releases and move the fleet")
    actions = releases.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="every release that is kept, oldest first")
    listing.add_argument("--json", action="store_true", help="the whole manifests as JSON")
    _add_address(listing)
    listing.set_defaults(run=_list)
    promote = actions.add_parser(
        "promote", help="stage and commit a release on every rollout server, past the gate"
    )
    promote.add_argument("version", type=int, metavar="N", help="draft version of the release")
    promote.add_argument(
        "--pin", action="store_true", help="keep it until a release is promoted without --pin"
    )
    _add_address(promote)
    promote.set_defaults(run=_promote)
    rollback = actions.add_parser(
        "rollback", help="put every rollout server back to the release served before"
    )
    rollback.add_argument("--reason", default="", help="for the trainer's log")
    _add_address(rollback)
    rollback.set_defaults(run=_rollback)
    return parser


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"the trainer's gRPC address (default: {DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds (default: 120)"
    )


def _status(arguments: argparse.Namespace) -> int:
    with open_channel(arguments.address) as channel:
        stub = pb_grpc.DraftTrainerStub(channel)
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=arguments.timeout)
    if arguments.json:
        print(json.dumps(_as_dict(status), indent=2))
        return 0
    for field in status.DESCRIPTOR.fields:
        if field.has_presence and not status.HasField(field.name):
            text = "none yet"
        else:
            value = getattr(status, field.name)
            repeated = field.name == "step_acceptance"
            text = " ".join(f"{v:.3f}" for v in value) if repeated else _text(value)
        print(f"{field.name.replace('_', ' '):24}{text or '-'}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with open_channel(arguments.address) as channel:
        stub = pb_grpc.DraftTrainerStub(channel)
        answer = stub.ListReleases(pb.ListReleasesRequest(), timeout=arguments.timeout)
    if arguments.json:
        print(json.dumps([_as_dict(release) for release in answer.releases], indent=2))
        return 0
    print(f"{'draft':>6} {'parent':>6} {'policy':>6} {'candidate':>9} {'incumbent':>9}  run")
    for release in answer.releases:
        parent = release.parent_version if release.HasField("parent_version") else "-"
        known = release.HasField("trained_against_policy_version")
        policy = release.trained_against_policy_version if known else "-"
        gate = release.gate
        gated = release.HasField("gate")
        candidate = f"{gate.candidate_acceptance_length:.3f}" if gated else "-"
        incumbent = f"{gate.incumbent_acceptance_length:.3f}" if gated else "-"
        print(
            f"{release.draft_version:>6} {parent:>6} {policy:>6} {candidate:>9} {incumbent:>9}"
            f"  {release.run_id or '-'}"
        )
    return 0


def _promote(arguments: argparse.Namespace) -> int:
    request = pb.PromoteReleaseRequest(draft_version=arguments.version, pin=arguments.pin)
    with open_channel(arguments.address) as channel:
        stub = pb_grpc.DraftTrainerStub(channel)
        result = stub.PromoteRelease(request, timeout=arguments.timeout)
    return _report(result)


def _rollback(arguments: argparse.Namespace) -> int:
    with open_channel(arguments.address) as channel:
        stub = pb_grpc.DraftTrainerStub(channel)
        result = stub.RollBackRelease(
            pb.RollBackReleaseRequest(reason=arguments.reason), timeout=arguments.timeout
        )
    return _report(result)


def _report(result: pb.PublishResult) -> int:
    print(f"the fleet serves draft {result.draft_version}")
    for server in result.servers:
        serves = f"draft {server.state.draft_version}" if server.HasField("state") else "unknown"
        print(f"  {server.address}: {serves}{'; ' + server.error if server.error else ''}")
    return 1 if any(server.error for server in result.servers) else 0


def _as_dict(message: Message) -> dict[str, object]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _explain(error: grpc.RpcError, address: str) -> str:
    refusal = refused_from(error)
    if refusal is not None:
        return str(refusal)
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return str(
        RefusedError(
            "--address",
            f"{address} ({code.name}: {details})",
            "a running draft-trainer",
            "start it with draft-trainer serve, or give its address",
        )
    )
