"""``draft-trainer status``: where a running trainer stands."""

from __future__ import annotations

import argparse
from typing import Any

from draft_trainer.cli.output import as_dict, print_json
from draft_trainer.cli.trainer import add_address, trainer
from slipstream.v1 import draft_trainer_pb2 as pb


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("status", help="where a running trainer stands")
    parser.add_argument("--json", action="store_true", help="the whole status as JSON")
    add_address(parser)
    parser.set_defaults(run=_status)


def _status(arguments: argparse.Namespace) -> int:
    with trainer(arguments) as stub:
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=arguments.timeout)
    if arguments.json:
        print_json(as_dict(status))
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


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
