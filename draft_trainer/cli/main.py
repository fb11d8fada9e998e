"""``draft-trainer``: run the trainer, ask a running one, or make a draft offline."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc

from draft_trainer.cli import fit, init, releases, serve, status
from draft_trainer.cli.trainer import explain
from slipstream.refusal import RefusedError

FAILED, REFUSED = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: it failed on the way; 2: refused, with the reason on stderr."""
    arguments = parser().parse_args(argv)
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
        print(f"draft-trainer: {explain(error, arguments.address)}", file=sys.stderr)
        return REFUSED


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    made = argparse.ArgumentParser(
        prog="draft-trainer",
        description="Trains an EAGLE-3 draft head on a moving policy's states and publishes it.",
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, init, fit, status, releases):
        command.add_to(commands)
    return made
