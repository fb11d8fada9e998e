"""The policy versions that a restart finds: matrices in files, versions in the ledger."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from draft_trainer.eagle3.policy_head import PolicyHead
from draft_trainer.feed.ledger import Ledger
from draft_trainer.feed.policy_files import PolicyFiles

Digests = tuple[bytes, bytes]


class KeptPolicies:
    """See ``SampleStore``, whose lock guards all but ``write``.

    Args:
        ledger: has the versions.
        folder: of the matrices.
    """

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger = ledger
        self._files = PolicyFiles(folder)

    def write(self, head: PolicyHead, digests: Digests) -> PolicyHead:
        """The same, its matrices mapped from files. Raises RefusedError: no room."""
        names = (digests[0].hex(), digests[1].hex())
        rows = self._files.keep(names[0], head.lm_head_rows)
        return PolicyHead(head.policy_version, rows, self._files.keep(names[1], head.embed_tokens))

    def record(self, version: int, digests: Digests) -> None:
        """A version whose matrices were written is known."""
        with self._ledger.transaction():
            self._ledger.put_policy(version, digests[0].hex(), digests[1].hex())

    def all(self) -> list[tuple[PolicyHead, Digests]]:
        """Every version, oldest first, with its matrices' digests."""
        return [
            (
                PolicyHead(version, self._files.read(rows), self._files.read(embed)),
                (bytes.fromhex(rows), bytes.fromhex(embed)),
            )
            for version, rows, embed in self._ledger.policies()
        ]

    def forget_others(self, versions: Set[int]) -> None:
        """Keep these versions only."""
        known = self._ledger.policies()
        with self._ledger.transaction():
            self._ledger.forget_policies({version for version, *_ in known} - versions)
        self._files.keep_only(
            {name for version, *names in known if version in versions for name in names}
        )
