"""How trainer and bridge are configured for the table."""

from __future__ import annotations

from pathlib import Path

from policy_bridge import BridgeConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo"
RUN, EPOCHS, HELD_OUT = "faults", 2, 0.02


def trainer_toml(memory: Path) -> str:
    """Small batches, states often, and a gate that nothing passes.

    Args:
        memory: for the files of shared memory.
    """
    return f"""
[server]
port = 0
metrics_port = 0
shared_memory = "{memory}"
[draft]
initial = "{EXAMPLE / "draft"}"
registry = "registry"
[replay]
capacity_bytes = 268435456
max_epochs = {EPOCHS}
max_policy_lag = 1000
held_out_fraction = {HELD_OUT}
[training]
batch_tokens = 96
linger_s = 0.02
state_every_steps = 8
nice = 0
cpu_kernels = "off"
[gate]
min_anchors = 1000000
[economy]
mode = "always"
"""


def bridge_config(address: str, transport: str, memory: Path) -> BridgeConfig:
    """Short deadlines: what waits for one is over soon, and a stall stands out."""
    return BridgeConfig(
        trainer=address,
        run_id=RUN,
        transport=transport,
        shared_memory=str(memory),
        outbox_bytes=4 << 20,
        connect_seconds=1.0,
        rpc_seconds=2.0,
        sync_seconds=2.0,
        announce_seconds=5.0,
        stall_seconds=5.0,
        max_backoff_seconds=0.3,
    )
