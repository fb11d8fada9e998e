"""Asks a service for its standard gRPC health; as a command, the probe of a container.

    python -m slipstream.health 127.0.0.1:50061 slipstream.v1.RolloutServer/ready

Kubernetes' own gRPC probes know no TLS, and images hold no second program for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT = 5.0
"""Seconds within which a live service answers."""


def serving(channel: grpc.Channel, service: str = "", timeout: float = TIMEOUT) -> bool:
    """Whether it says SERVING. ``service`` empty: the process as a whole.

    Raises:
        grpc.RpcError: it does not answer, or knows no such service.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if it serves; 1, and what is the matter on stderr, if not."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.health", description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("service", nargs="?", default="", help="default: the process as a whole")
    # No token: health is open to everybody who may connect.
    parser.add_argument("--ca", type=Path, help="PEM of the CA of its certificate; turns TLS on")
    parser.add_argument("--certificate", type=Path, help="PEM, where it asks for one")
    parser.add_argument("--key", type=Path, help="PEM of its private key")
    args = parser.parse_args(argv)
    try:
        pem = [p.read_bytes() if p else None for p in (args.ca, args.key, args.certificate)]
    except OSError as error:
        parser.error(str(error))
    tls = grpc.ssl_channel_credentials(*pem)
    with (
        grpc.secure_channel(args.address, tls) if args.ca else grpc.insecure_channel(args.address)
    ) as channel:
        try:
            if serving(channel, args.service):
                return 0
            print("not serving", file=sys.stderr)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
