"""The bridge inside the policy's training job: captures, ships, and brackets weight syncs.

    bridge = PolicyBridge(model, BridgeConfig(trainer="127.0.0.1:50051", run_id="grpo-1"))
    with bridge:
        with bridge.sync(version=1) as window:
            window.push_policy()
        with bridge.capture(temperature=1.0) as capture:
            logits = model(input_ids=ids, attention_mask=mask).logits
            capture.ship(ids, attention_mask=mask, loss_mask=completion_mask)

Importing this package loads neither torch nor gRPC: a training image that only
has the bridge switched off must not pay seconds for it. The names below load
what they need when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policy_bridge.bridge import DisabledBridge, PolicyBridge
    from policy_bridge.config import BridgeConfig, ModulePaths
    from policy_bridge.stats import BridgeStats, SyncResult
    from policy_bridge.sync import PolicySyncError

_HOMES = {
    "bridge": ("DisabledBridge", "PolicyBridge"),
    "config": ("BridgeConfig", "ModulePaths"),
    "stats": ("BridgeStats", "SyncResult"),
    "sync": ("PolicySyncError",),
}

__all__ = [
    "BridgeConfig",
    "BridgeStats",
    "DisabledBridge",
    "ModulePaths",
    "PolicyBridge",
    "PolicySyncError",
    "SyncResult",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
