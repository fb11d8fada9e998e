"""Shared by the commands: the connection to a running trainer, and the output of answers."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from tyro.conf import arg

from slipstream.errors import RefusedError, failure_text, refused_from
from slipstream.serving.identity import ClientCredentials
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
GRPC_SCHEMES = ("unix:", "dns:", "ipv4:", "ipv6:")
_UNTRUSTED = re.compile(
    r"(?<=CERTIFICATE_VERIFY_FAILED: )[^:\]]+|Hostname Verification Check failed|"
    r"Peer name \S+ is not in peer certificate"
)
"""The words in which gRPC's core says that it does not trust a server."""


def _credentials_from_environment() -> ClientCredentials:
    def file(name: str) -> Path | None:
        path = os.environ.get(f"SLIPSTREAM_{name}")
        return Path(path) if path else None

    files = (file("CA"), file("CERTIFICATE"), file("KEY"), file("TOKEN_FILE"))
    return ClientCredentials(*files, os.environ.get("SLIPSTREAM_SERVER_NAME", ""))


File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(optional)")]
Folder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(optional)")]
Needed = Annotated[Path, arg(metavar="DIR")]
Count = Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")]
ExtraNorm = Literal["norm_output", "fc_norm", "qk_norm"]
"""A norm that EAGLE-3.1 adds, by its switch in ``drafters.eagle3.config.HeadConfig``."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The options of every command that asks a running trainer.

    The credentials are files. Environment variables (SLIPSTREAM_CA and so on) give defaults.
    """

    address: Annotated[str, arg(metavar="HOST:PORT")] = DEFAULT_ADDRESS
    """The trainer's gRPC address."""
    timeout: Annotated[float, arg(metavar="S")] = 120.0
    """Seconds to wait for the answer."""
    credentials: Annotated[ClientCredentials, arg(name="")] = field(
        default_factory=_credentials_from_environment
    )

    @contextmanager
    def trainer(self) -> Iterator[pb_grpc.DraftTrainerStub]:
        """Yield the trainer's calls, for the length of a ``with`` block.

        Raises:
            RefusedError: a file cannot be used, or a call failed and the block did not catch it.
        """
        from slipstream.client import open_channel, split_address

        if not self.address.startswith(GRPC_SCHEMES):
            try:
                split_address(self.address)
            except ValueError as error:
                raise RefusedError("--address", error, "host:port", "correct it") from error
        self.credentials.check("--")
        self.credentials.check_address(self.address, "--address")
        with open_channel(self.address, credentials=self.credentials) as channel:
            try:
                yield pb_grpc.DraftTrainerStub(channel)
            except grpc.RpcError as error:
                raise explained(error, self.address) from error


def explained(error: grpc.RpcError, address: str) -> RefusedError:
    """Return the error that tells of a failed call in one line, with the next step."""
    refusal = refused_from(error)
    if refusal is not None:
        return refusal
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RefusedError(
            "--timeout",
            f"no answer from {address} in time",
            "an answer",
            "check draft-trainer status; allow more time with --timeout",
        )
    untrusted = _UNTRUSTED.search(failure_text(error))
    if untrusted is not None:
        return RefusedError(
            "--ca",
            f"a certificate of {address} that is not trusted ({untrusted.group()})",
            "a certificate of that CA, valid now, for the name in --address",
            "inspect it with: openssl s_client -connect ADDRESS -showcerts; give the right --ca, "
            "or --server-name if the address is not the name in it",
        )
    return RefusedError(
        "--address",
        f"{address} ({failure_text(error)})",
        "a running draft-trainer",
        "start it with draft-trainer serve, or give the address that it printed when it was ready; "
        "--ca if it has a certificate, --certificate and --key if it has access.client_ca",
    )


def at_least(option: str, value: float | None, least: float) -> None:
    """Check an option, where it is given. Raises RefusedError: the value is below ``least``."""
    if value is not None and not value >= least:
        raise RefusedError(option, value, f"at least {least:g}", f"raise {option}")


def as_dict(message: Message) -> dict[str, object]:
    """Convert a message to JSON, fields with their default value included; bytes as base64."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


def print_table(rows: Sequence[Sequence[object]]) -> None:
    """Print the lines of ``table``."""
    for line in table(rows):
        print(line)


def table(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield rows as lines of columns; the first row is the head.

    A column whose head ends with a blank is aligned to the left, others to the right.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i].strip()) for row in texts) for i in range(len(texts[0]))]
    for row in texts:
        cells = [
            cell.strip().ljust(width) if head.endswith(" ") else cell.strip().rjust(width)
            for cell, width, head in zip(row, widths, texts[0], strict=True)
        ]
        yield "  ".join(cells).rstrip()


def mebibytes(size: int) -> str:
    """Format bytes in MiB, with at least three digits."""
    mib = size / 2**20
    return f"{mib:.0f}" if mib >= 100 else f"{mib:.3g}"


def when(seconds: float) -> str:
    """Format seconds since the epoch as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
