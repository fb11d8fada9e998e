"""``draft-trainer releases``: look at releases, copy them in and out, move the fleet."""

from __future__ import annotations

from typing import Any

from draft_trainer.cli.releases import diff, exporting, importing, looking, moving, verifying


def add_to(commands: Any) -> None:
    """Register the commands. Nothing here loads torch: help answers at once."""
    parser = commands.add_parser(
        "releases",
        help="look at releases, copy them in and out, move the fleet",
        description="A release is an immutable draft checkpoint in a trainer's registry. Commands "
        "ask the trainer that runs at --address; those with --registry also work on the folder "
        "itself, without one.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for action in (looking, diff, moving, exporting, importing, verifying):
        action.add_to(actions)
