"""Whether a call may be made, by its token or by its caller's certificate."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from slipstream.refusal import RefusedError, StatusCode
from slipstream.roles import Role, roles_granted
from slipstream.tls import TlsFiles
from slipstream.tokens import MAX_CHARACTERS, TokenFiles

logger = logging.getLogger(__name__)

ANY_NAME = "*"
"""Stands for every certificate of the CA."""

REASONS = ("no_credentials", "unknown_token", "unknown_certificate", "role", "tls")
"""Why a call was refused; ``tls`` is a handshake with the HTTP server that failed."""

_PERIOD_SECONDS = 60.0
_MAX_PEERS = 1024
_GIVE_ONE = (
    "give a token (draft-trainer: --token-file; PolicyBridge: trainer_credentials or "
    "rollout_credentials; HTTP: Authorization: Bearer) or a client certificate that has the role; "
    "docs/security.md says how"
)


class AccessRefusals:
    """Counts what was refused, and logs each peer once a minute. Thread-safe.

    Args:
        count: told every reason too, for metrics kept elsewhere.
    """

    def __init__(self, count: Callable[[str], None] = lambda reason: None) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: OrderedDict[str, float] = OrderedDict()

    def counts(self) -> dict[str, int]:
        """Refusals since the start, by reason (``REASONS``)."""
        with self._lock:
            return dict(self._counts)

    def add(self, reason: str, peer: str, what: str) -> None:
        """One more.

        Args:
            reason: of ``REASONS``.
            peer: as gRPC or the socket names it, with the port last.
            what: was asked for, and why not.
        """
        host, now = peer.rpartition(":")[0] or peer, time.monotonic()
        with self._lock:
            self._counts[reason] += 1
            due = now - self._logged.get(host, -_PERIOD_SECONDS) >= _PERIOD_SECONDS
            if due:
                self._logged[host] = now
                self._logged.move_to_end(host)
                if len(self._logged) > _MAX_PEERS:
                    self._logged.popitem(last=False)
        self._count(reason)
        if due:
            logger.warning("refused %s: %s (of this host no more for a minute)", peer, what)


@dataclass(frozen=True)
class Refused:
    """A call that may not be made: why, and what its caller is told."""

    reason: str
    error: RefusedError


class Access:
    """What a server asks of its callers. Thread-safe.

    Args:
        tls: its certificate; None for plain text.
        tokens: which roles they open.
        names: for each role, names of client certificates that open it, or ``ANY_NAME``.
        refusals: where they are counted and logged.
    """

    def __init__(
        self,
        tls: TlsFiles | None,
        tokens: TokenFiles,
        names: Mapping[Role, Collection[str]],
        refusals: AccessRefusals | None = None,
    ) -> None:
        self.tls = tls
        self.refusals = refusals or AccessRefusals()
        self._tokens = tokens
        self._names = {role: frozenset(some) for role, some in names.items() if some}

    @property
    def anonymous(self) -> bool:
        """Whether everybody may do everything."""
        return not self._tokens and not self._names

    @property
    def by_certificate(self) -> bool:
        """Whether a client's certificate may open something."""
        return bool(self._names)

    def judge(
        self, role: Role | None, authorization: str | None, names: Collection[str] = ()
    ) -> Refused | None:
        """None if a call that needs ``role`` may be made.

        Args:
            role: None: nobody may.
            authorization: the header's value, if there was one.
            names: in the client's verified certificate.
        """
        if self.anonymous and role is not None:
            return None
        token = bearer(authorization)
        held = self._tokens.roles_of(token) if token is not None else frozenset[Role]()
        held |= {r for r, some in self._names.items() if names and (some & {ANY_NAME, *names})}
        if role is not None and role in roles_granted(held):
            return None
        needed = "nobody's" if role is None else role
        if held:
            found = f"credentials of the role {' and '.join(sorted(held))}"
            return self._refused("role", found, needed, StatusCode.PERMISSION_DENIED)
        if authorization is not None:
            return self._refused("unknown_token", "a token that opens nothing here", needed)
        if names:
            found = "a certificate whose names open nothing here"
            return self._refused("unknown_certificate", found, needed)
        return self._refused("no_credentials", "no token", needed)

    @staticmethod
    def _refused(
        reason: str, found: str, needed: str, code: StatusCode = StatusCode.UNAUTHENTICATED
    ) -> Refused:
        return Refused(
            reason,
            RefusedError("authorization", found, f"the role {needed}", _GIVE_ONE, code),
        )


def bearer(authorization: str | None) -> bytes | None:
    """The token in an Authorization header; None where there is none that could be one."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_CHARACTERS:
        return None
    return token.strip().encode("utf-8", "replace")


def open_to_all() -> Access:
    """Asks nothing of anybody: for loopback."""
    return Access(None, TokenFiles({}, ""), {})
