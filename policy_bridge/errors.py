"""Errors of the other side, in one line for people."""

from __future__ import annotations

import grpc

from slipstream.refusal import refused_from


def describe(error: BaseException) -> str:
    """A refusal's four texts, or gRPC's status, or the error's own text."""
    if isinstance(error, grpc.RpcError):
        refusal = refused_from(error)
        if refusal is not None:
            return str(refusal)
        if isinstance(error, grpc.Call):
            return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
