"""Room for samples, and who copies into it: as the policy's device needs them."""

from __future__ import annotations

from policy_bridge.config import BridgeConfig
from policy_bridge.modules import PolicyModules
from policy_bridge.outbox import Outbox
from policy_bridge.pool import HostPool
from policy_bridge.runner import Inline, Runner, runner_for
from policy_bridge.stats import Counters


def sample_memory(
    config: BridgeConfig, modules: PolicyModules | None, counters: Counters
) -> tuple[Outbox, Runner]:
    """An outbox over a pool, pinned for a policy on a CUDA device, and a runner for its copies.

    Args:
        config: its bound.
        modules: the policy; None where it cannot be captured.
        counters: where shed samples are counted.
    """
    if modules is None or not config.bytes_per_step:
        return Outbox(config.outbox_bytes, counters), Inline()
    device = modules.head_weight.device
    # A little more than the bound: each loan is rounded up, and gaps are left between them.
    nbytes = config.outbox_bytes + config.outbox_bytes // 100
    pool = HostPool(nbytes, pinned=device.type == "cuda")
    return Outbox(config.outbox_bytes, counters, pool), runner_for(device)
