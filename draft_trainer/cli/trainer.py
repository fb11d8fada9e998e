"""How a command reaches a running trainer."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from slipstream.client import open_channel
from slipstream.errors import RefusedError, refused_from
from slipstream.security import ClientCredentials
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

_UNTRUSTED = re.compile(
    r"(?<=CERTIFICATE_VERIFY_FAILED: )[^:\]]+|Hostname Verification Check failed|"
    r"Peer name \S+ is not in peer certificate"
)
"""How gRPC's core says that it does not trust a server."""

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
    add_credentials(parser)


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """The options that say what is shown to the trainer; each has an environment variable."""
    group = parser.add_argument_group(
        "credentials", "Files, for a trainer with [access]; SLIPSTREAM_CA and so on are defaults."
    )
    for option, what in (
        ("ca", "PEM of the CA that signed the trainer's certificate; turns TLS on"),
        ("certificate", "PEM of a client certificate"),
        ("key", "PEM of its private key"),
        ("token-file", "file with a token, which has the role that the command needs"),
    ):
        default = os.environ.get(f"SLIPSTREAM_{option.replace('-', '_').upper()}")
        group.add_argument(
            f"--{option}",
            type=Path,
            default=Path(default) if default else None,
            metavar="FILE",
            help=what,
        )
    group.add_argument(
        "--server-name",
        default=os.environ.get("SLIPSTREAM_SERVER_NAME", ""),
        metavar="NAME",
        help="name in the trainer's certificate, where it is not that of --address",
    )
    group.add_argument(
        "--allow-plaintext",
        action="store_true",
        help="send the token over the network without TLS",
    )


def credentials_of(arguments: argparse.Namespace) -> ClientCredentials:
    """What the options say, checked. Raises RefusedError: a file cannot be used."""
    shown = ClientCredentials(
        arguments.ca,
        arguments.certificate,
        arguments.key,
        arguments.token_file,
        arguments.server_name,
        arguments.allow_plaintext,
    )
    shown.check("--")
    shown.check_address(arguments.address, "--address")
    return shown


@contextmanager
def trainer(arguments: argparse.Namespace) -> Iterator[pb_grpc.DraftTrainerStub]:
    """The trainer's calls, for the length of a ``with`` block."""
    with open_channel(arguments.address, credentials=credentials_of(arguments)) as channel:
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
    untrusted = _UNTRUSTED.search(details or "")
    if untrusted is not None:
        return str(
            RefusedError(
                "--ca",
                f"a certificate of {address} that does not stand up to it ({untrusted.group()})",
                "a certificate of that CA, valid now, for the name in --address",
                "look at it with: openssl s_client -connect ADDRESS -showcerts; give the right "
                "--ca, or --server-name where the address is not the name in it",
            )
        )
    return str(
        RefusedError(
            "--address",
            f"{address} ({code.name}: {details})",
            "a running draft-trainer",
            "start it with draft-trainer serve, or give the address that it printed when it was "
            "ready; --ca where it has a certificate, --certificate and --key where it has "
            "access.client_ca",
        )
    )
