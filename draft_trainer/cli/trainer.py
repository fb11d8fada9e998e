"""How a command reaches a running trainer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from slipstream.channel import open_channel
from slipstream.refusal import RefusedError, refused_from
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_address(parser: argparse.ArgumentParser, timeout: float = 120.0) -> None:
    """The options that every command to a running trainer has."""
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"the trainer's gRPC address (default: {DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout,
        metavar="S",
        help=f"seconds to wait for its answer (default: {timeout:.0f})",
    )


@contextmanager
def trainer(arguments: argparse.Namespace) -> Iterator[pb_grpc.DraftTrainerStub]:
    """The trainer's calls, for the length of a ``with`` block."""
    with open_channel(arguments.address) as channel:
        yield pb_grpc.DraftTrainerStub(channel)


def explain(error: grpc.RpcError, address: str) -> str:
    """A failed call in one line, with the next step."""
    refusal = refused_from(error)
    if refusal is not None:
        return str(refusal)
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return str(
            RefusedError(
                "--timeout",
                f"no answer from {address} in time",
                "an answer",
                "look at draft-trainer status; give it longer with --timeout",
            )
        )
    return str(
        RefusedError(
            "--address",
            f"{address} ({code.name}: {details})",
            "a running draft-trainer",
            "start it with draft-trainer serve, or give the address that it printed when it was "
            "ready",
        )
    )
