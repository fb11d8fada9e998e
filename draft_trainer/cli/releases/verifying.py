"""``draft-trainer releases verify``: whether releases still are what was released."""

from __future__ import annotations

import argparse
from typing import Any

from draft_trainer.cli.output import print_json
from draft_trainer.cli.releases.looking import DRAFT_HELP
from draft_trainer.cli.releases.source import add_source, source
from slipstream.errors import RefusedError


def add_to(actions: Any) -> None:
    """Register the command."""
    parser = actions.add_parser(
        "verify",
        help="check every byte of releases against their manifests",
        description="Checks names, config.json, sizes and every tensor's SHA-256. Exit status 1: a "
        "release is damaged.",
    )
    parser.add_argument(
        "versions", type=int, nargs="*", metavar="N", help=DRAFT_HELP + " (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    add_source(parser)
    parser.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    with source(arguments) as releases:
        known = arguments.versions or [use.draft_version for use in releases.listing()[1]]
        damage: dict[int, str] = {}
        for version in known:
            damage[version] = ""
            try:
                releases.verify(version)
            except RefusedError as error:
                damage[version] = str(error)
    if arguments.json:
        print_json([{"draft_version": v, "damage": text} for v, text in damage.items()])
    else:
        for version, text in damage.items():
            print(f"draft {version}: {text or 'sound'}")
    return 1 if any(damage.values()) else 0
