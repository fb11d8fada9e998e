"""The policy version that sampled each token of a request that continues across commits.

A client that sends the header ``x-slipstream-policy-versions`` with ``POST /v1/completions`` gets
it back with JSON: ``{"version": 4, "spans": {"0/2": [[0, 3], [41, 4]]}}``. Sample 2 of prompt 0 has
41 tokens of version 3 and the rest of version 4; samples that ``spans`` does not name are of
``version`` alone. A version is null until one was pushed. Streamed answers have no such header.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

HEADER = "x-slipstream-policy-versions"
PATH = "/v1/completions"
MAX_CHARACTERS = 8_000
"""The longest header: HTTP clients refuse longer ones."""

_NAME = re.compile(r"(?:(\d+)_)?cmpl-([0-9a-f]{32})-(\d+)(?:-[0-9a-f]{8})?")
"""vLLM's name of a sample: number of the sample, request, number of the prompt, random letters."""

Spans = list[tuple[int, int | None]]
"""First token and policy version of each span."""


class PolicySpans:
    """Follows requests over policy commits; owned by the API server's event loop.

    Attributes:
        version: the one that samples; None until one was pushed.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        # The samples that saw a commit, of requests that are being answered.
        self._open: dict[str, dict[str, Spans]] = {}

    def begin(self, name: str) -> None:
        """Follow a request of this name (32 hexadecimal digits), about to go to the engine."""
        self._open[name] = {}

    def commit(self, version: int, requests: Mapping[str, int]) -> None:
        """Note that another version samples from now on.

        Args:
            version: that one.
            requests: by vLLM's name, the tokens that each sample has so far, -1 if it has ended
                since the last commit. A sample that is missing reaches the engine later.
        """
        for name, tokens in requests.items():
            found = _NAME.fullmatch(name)
            if found is None or found[2] not in self._open:
                continue
            sample = f"{found[3]}/{found[1] or 0}"
            spans = self._open[found[2]].setdefault(sample, [(0, self.version)])
            if spans[-1][0] == tokens:
                spans[-1] = (tokens, version)
            elif tokens >= 0:
                spans.append((tokens, version))
        self.version = version

    def so_far(self, name: str) -> str:
        """The header's value; "too long" if that is more than ``MAX_CHARACTERS``."""
        value = {"version": self.version, "spans": self._open[name]}
        text = json.dumps(value, separators=(",", ":"))
        return text if len(text) <= MAX_CHARACTERS else "too long"

    def end(self, name: str) -> None:
        """Forget a request that was answered, or whose client left."""
        self._open.pop(name, None)


class PolicyVersions:
    """An ASGI middleware that adds the header for those who ask for it."""

    def __init__(self, app: Any, spans: PolicySpans) -> None:
        self._app, self._spans = app, spans

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        asked = scope["type"] == "http" and scope["path"] == PATH
        headers = scope["headers"] if asked else []
        if not any(key == HEADER.encode() for key, _ in headers):
            await self._app(scope, receive, send)
            return
        name = uuid.uuid4().hex
        # vLLM takes the request's name from this header. A client may give one name to several.
        kept = [(key, value) for key, value in headers if key != b"x-request-id"]
        named = {**scope, "headers": [*kept, (b"x-request-id", name.encode())]}

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start" and not _streamed(message):
                value = self._spans.so_far(name).encode()
                message = {**message, "headers": [*message["headers"], (HEADER.encode(), value)]}
            await send(message)

        self._spans.begin(name)
        try:
            await self._app(named, receive, answer)
        finally:
            self._spans.end(name)


def _streamed(message: Any) -> bool:
    return any(
        key.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for key, value in message["headers"]
    )
