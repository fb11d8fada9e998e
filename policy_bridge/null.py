"""The same surfaces with nothing behind them, so that the training loop has no branch."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from policy_bridge.stats import BridgeStats, Counters, SyncResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


class NullCapture:
    """A capture window that takes nothing: no hooks, no copies."""

    def __enter__(self) -> NullCapture:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def ship(
        self,
        input_ids: torch.Tensor,
        *,
        loss_mask: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        sampled_logprobs: torch.Tensor | None = None,
        sampled_logits: torch.Tensor | None = None,
        acceptance: torch.Tensor | Sequence[float] | None = None,
    ) -> None:
        """Nothing. See ``Capture.ship``."""


class NullSyncWindow:
    """A sync window without Slipstream in it."""

    def __init__(self, version: int) -> None:
        self.result: SyncResult | None = SyncResult(version)

    def __enter__(self) -> NullSyncWindow:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def push_policy(
        self, source: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Raise: doing nothing here would leave the rollouts on an old policy, unseen."""
        from slipstream.refusal import RefusedError

        raise RefusedError(
            "push_policy",
            "a disabled bridge",
            "a bridge that reaches the rollout servers",
            "enable the bridge, or sync the policy by the framework's own means",
        )


class DisabledBridge:
    """What ``PolicyBridge`` offers, doing nothing; start no thread, open no connection."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._counters = Counters()

    def __enter__(self) -> DisabledBridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def policy_version(self) -> int | None:
        """The last version given to ``sync``."""
        return self._version

    def sync(self, version: int, *, lead: bool = True) -> NullSyncWindow:
        """A window that does nothing."""
        self._version = version
        return NullSyncWindow(version)

    def capture(self, *, temperature: float = 1.0, forwards: int | None = None) -> NullCapture:
        """A window that takes nothing."""
        self._counters.add(captures_skipped=1)
        return NullCapture()

    def wait_connected(self, timeout: float) -> bool:
        """False: there is no trainer."""
        return False

    def flush(self, timeout: float) -> bool:
        """True: nothing waits."""
        return True

    def stats(self) -> BridgeStats:
        """Zeros, and how many captures were skipped."""
        return self._counters.snapshot(
            connected=False,
            policy_version=self._version,
            outbox_samples=0,
            outbox_bytes=0,
            last_sync=None,
            capture_off_reason="the bridge is disabled",
        )

    def close(self) -> None:
        """Nothing to close."""


def null_bridge() -> DisabledBridge:
    """A bridge that is switched off."""
    return DisabledBridge()
