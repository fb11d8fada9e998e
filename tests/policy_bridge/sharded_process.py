"""The checks of a rank of a sharded policy, in a process group (``tests.adapters.ranks``)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from policy_bridge import BridgeConfig
from policy_bridge.session import PolicyMatrices
from policy_bridge.sync import SyncWindow, policy_tensors
from policy_bridge.weight_watch import WeightWatch
from slipstream.errors import RefusedError
from tests.policy_bridge.conftest import batch
from tests.policy_bridge.policies import adapted
from tests.policy_bridge.windows import Windows, assert_same_bits, gradients, session_of
from tests.tiny import tiny_qwen3


def check_rank() -> None:
    """Everything that a rank of an FSDP2 policy does with a bridge."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, model = tiny_qwen3(), tiny_qwen3()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    data = batch((9, 5, 12), seed=rank)

    plain = [g.full_tensor() for g in gradients(model, data, None)]
    windows = Windows(model)
    bridged = [g.full_tensor() for g in gradients(model, data, windows)]
    assert_same_bits(plain, bridged)
    assert len(windows.samples) == 3
    training = Windows(model, training=True)
    bridged = [g.full_tensor() for g in gradients(model, data, training)]
    assert_same_bits(plain, bridged)
    for row in range(3):
        sample, own = training.of_row(data, row), windows.of_row(data, row)
        assert torch.equal(sample.block, own.block)

    # The numbers come from the pass's own logits: no rank may gather lm_head on its own.
    sample = windows.of_row(data, 2)
    with torch.no_grad():
        logits = whole(data["input_ids"][2:]).logits[0]
    own = logits[:-1].gather(-1, data["input_ids"][2, 1:, None]).squeeze(-1)
    torch.testing.assert_close(sample.sampled_logits[1:], own, atol=1e-5, rtol=1e-5)
    log_p = own - logits[:-1].logsumexp(-1)
    torch.testing.assert_close(sample.sampled_logprobs[1:], log_p, atol=1e-5, rtol=1e-5)

    # Only the last rank reaches a trainer: the others take part and keep nothing.
    matrices, modules = PolicyMatrices(windows.modules), windows.modules
    session = session_of(modules) if rank == world - 1 else None
    snapshot = matrices.snapshot(session, 1)
    assert (snapshot is None) == (session is None)
    if snapshot is not None:
        assert torch.equal(snapshot.tensors["lm_head.weight"], whole.lm_head.weight)
        embed = whole.model.embed_tokens.weight
        assert torch.equal(snapshot.tensors["embed_tokens.weight"], embed)
    assert matrices.snapshot(None, 2) is None

    watch = WeightWatch()
    for settings in ({}, {"foreach": True}, {"fused": True}):
        watch.synced(modules.weights())
        assert not watch.moved()
        torch.optim.AdamW(model.parameters(), 0.1, **settings).step()
        assert watch.moved()
    weights = modules.weights()
    watch.synced(weights)
    before = weights[0]._version
    model._apply(torch.clone)  # as moving the model to another device and back
    assert weights[0]._version != before
    assert not watch.moved()
    torch.optim.AdamW(model.parameters(), 0.1).step()
    assert watch.moved()
    watch.close()

    # The lead alone must not begin to gather: it would wait for ever.
    if rank == 0:
        config, servers = BridgeConfig("trainer:1", "run"), ["server:1"]
        window = SyncWindow(
            1, model, config, trainer=None, session=None, servers=servers, fleet_known=True,
            fleet=None, lead=True,
        )  # fmt: skip
        for source in (None, model.state_dict()):
            with pytest.raises(RefusedError, match=f"sharded over {world} ranks"):
                window.push_policy(source)

    for dtype in ("", "bfloat16"):
        pushed = policy_tensors(model, dtype)
        assert {name: tuple(t.shape) for name, t in pushed.items()} == {
            name: tuple(t.shape) for name, t in whole.state_dict().items()
        }

    lora = adapted(modules_to_save=["norm"])
    merged = policy_tensors(lora, "")
    for part in (*lora.get_decoder().layers, lora):
        fully_shard(part, mesh=mesh)
    gathered = get_model_state_dict(lora, options=StateDictOptions(full_state_dict=True))
    for source in (lora, gathered):
        pushed = policy_tensors(source, "", lora)
        assert pushed.keys() == merged.keys()
        assert all(torch.equal(pushed[name], tensor) for name, tensor in merged.items())
