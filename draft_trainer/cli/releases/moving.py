"""``draft-trainer releases promote | rollback | pin | unpin``."""

from __future__ import annotations

import argparse
from typing import Any

from draft_trainer.cli.output import as_dict, print_json
from draft_trainer.cli.releases.looking import DRAFT_HELP
from draft_trainer.cli.releases.source import add_source, open_folder
from draft_trainer.cli.trainer import add_address, trainer
from slipstream.v1 import draft_trainer_pb2 as pb


def add_to(actions: Any) -> None:
    """Register the commands."""
    promote = actions.add_parser(
        "promote",
        help="stage and commit a release on every rollout server, past the gate",
        description="Makes a release live on every rollout server, whatever the gate says of it. "
        "Where that fails on one, all end on the release they had. Exit status 1: it did. With "
        "--registry the next trainer on that folder does it.",
    )
    promote.add_argument("version", type=int, metavar="N", help=DRAFT_HELP)
    promote.add_argument(
        "--pin",
        action="store_true",
        help="the gate replaces it no more, until a release is promoted without --pin",
    )
    promote.set_defaults(run=_promote)
    rollback = actions.add_parser(
        "rollback",
        help="put every rollout server back to the release served before",
        description="Puts every rollout server back to the release that the fleet served before. "
        "Exit status 1: a server did not follow; it does at the next publish.",
    )
    rollback.add_argument("--reason", default="", help="for the trainer's log")
    rollback.set_defaults(run=_rollback)
    pin = actions.add_parser(
        "pin",
        help="never remove a release, over restarts",
        description="Spares a release from draft.keep_releases and draft.keep_bytes.",
    )
    unpin = actions.add_parser(
        "unpin",
        help="let retention remove a release again",
        description="Lets draft.keep_releases and draft.keep_bytes decide on a release again.",
    )
    for parser, pinned in ((pin, True), (unpin, False)):
        parser.add_argument("version", type=int, metavar="N", help=DRAFT_HELP)
        parser.set_defaults(run=_pin, pinned=pinned)
    for parser in (promote, rollback, pin, unpin):
        parser.add_argument("--json", action="store_true", help="the answer as JSON")
        (add_address if parser in (pin, unpin) else add_source)(parser)


def _promote(arguments: argparse.Namespace) -> int:
    if arguments.registry is not None:
        from draft_trainer.releases.registry import promote_offline

        promote_offline(open_folder(arguments.registry), arguments.version, arguments.pin)
        return _report(pb.PublishResult(draft_version=arguments.version), arguments.json)
    request = pb.PromoteReleaseRequest(draft_version=arguments.version, pin=arguments.pin)
    with trainer(arguments) as stub:
        result = stub.PromoteRelease(request, timeout=arguments.timeout)
    return _report(result, arguments.json)


def _rollback(arguments: argparse.Namespace) -> int:
    if arguments.registry is not None:
        from draft_trainer.releases.registry import roll_back_offline

        version = roll_back_offline(open_folder(arguments.registry), arguments.reason)
        return _report(pb.PublishResult(draft_version=version), arguments.json)
    request = pb.RollBackReleaseRequest(reason=arguments.reason)
    with trainer(arguments) as stub:
        result = stub.RollBackRelease(request, timeout=arguments.timeout)
    return _report(result, arguments.json)


def _pin(arguments: argparse.Namespace) -> int:
    request = pb.PinReleaseRequest(draft_version=arguments.version, pinned=arguments.pinned)
    with trainer(arguments) as stub:
        use = stub.PinRelease(request, timeout=arguments.timeout)
    if arguments.json:
        print_json(as_dict(use))
    else:
        print(f"draft {use.draft_version} is kept as: {', '.join(use.kept_as) or 'nothing'}")
    return 0


def _report(result: pb.PublishResult, as_json: bool) -> int:
    if as_json:
        print_json(as_dict(result))
    else:
        print(f"the fleet serves draft {result.draft_version}")
        for server in result.servers:
            serves = (
                f"draft {server.state.draft_version}" if server.HasField("state") else "unknown"
            )
            print(f"  {server.address}: {serves}{'; ' + server.error if server.error else ''}")
    return 1 if any(server.error for server in result.servers) else 0
