"""The bridge inside the policy's training job: captures, ships, and brackets weight syncs.

In a training loop:

    bridge = PolicyBridge(model, BridgeConfig(trainer="127.0.0.1:50051", run_id="grpo-1"))
    with bridge:
        with bridge.sync(version=1) as window:
            window.push_policy()
        with bridge.capture(temperature=1.0) as capture:
            logits = model(input_ids=ids, attention_mask=mask).logits
            capture.ship(ids, attention_mask=mask, loss_mask=completion_mask)
"""

from policy_bridge.bridge import DisabledBridge, PolicyBridge
from policy_bridge.config import BridgeConfig, ModulePaths
from policy_bridge.stats import BridgeStats, SyncResult
from policy_bridge.sync import PolicySyncError

__all__ = [
    "BridgeConfig",
    "BridgeStats",
    "DisabledBridge",
    "ModulePaths",
    "PolicyBridge",
    "PolicySyncError",
    "SyncResult",
]
