"""``draft-trainer``: run the trainer, ask a running one, or make a draft offline."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import grpc

from draft_trainer.cli import completion, events, fit, init, releases, serve, status, top
from draft_trainer.cli.trainer import explain
from slipstream.errors import RefusedError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: it failed on the way; 2: refused, with the reason on stderr;
    130: interrupted."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except RefusedError as error:
        print(f"draft-trainer: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read this had enough of it (| head). Python would try to flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
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


def build_parser() -> argparse.ArgumentParser:
    """Every command with its options."""
    parser = argparse.ArgumentParser(
        prog="draft-trainer",
        description="Trains an EAGLE-3 draft head on a moving policy's states and publishes it.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, init, fit, status, top, events, releases, completion):
        command.add_to(commands)
    return parser
