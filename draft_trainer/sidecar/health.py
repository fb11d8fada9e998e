"""The standard health service, which keeps nothing for names that nobody serves."""

# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc
from grpc_health.v1 import health


class Health(health.HealthServicer):  # type: ignore[misc]
    """As its base, which remembers for ever every name that was watched once.

    Args:
        names: of services whose health will be set.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)

    def Watch(
        self, request: Any, context: grpc.ServicerContext, send_response_callback: Any = None
    ) -> Any:
        """gRPC's."""
        if request.service not in self._names:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return super().Watch(request, context, send_response_callback)
