"""Policies that are wrapped for several ranks: DDP and FSDP2, on gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from policy_bridge import ModulePaths, PolicyBridge, session
from policy_bridge.capture import NullCapture
from policy_bridge.extraction import Record, picked_logits
from policy_bridge.hooks import ForwardStates, ForwardTap
from policy_bridge.logits import ReturnedLogits
from policy_bridge.model import find_modules, full_tensor
from policy_bridge.session import PolicyMatrices
from policy_bridge.sync import policy_tensors
from policy_bridge.weight_watch import watched
from slipstream.errors import RefusedError
from slipstream.sampling import LogitForm
from slipstream.tensors import dtype_from_wire
from tests.gpu.shortages import shortage
from tests.tiny import tiny_qwen3

from .conftest import HIDDEN, VOCAB, Connect, batch, deliver, make_model, ship, sync
from .doubles import DEADLINE, FakeTrainer
from .policies import qwen3_moe
from .windows import Batch, Windows, hooks_on, own_logprobs, session_of

pytestmark = pytest.mark.contract("never waits")


def test_ddp_policy_is_announced_and_pushed_by_plain_names(one_rank: None) -> None:
    model = DistributedDataParallel(tiny_qwen3())
    modules = find_modules(model, ModulePaths())
    snapshot = PolicyMatrices(modules).snapshot(session_of(modules), 1)
    assert snapshot is not None
    assert torch.equal(snapshot.tensors["lm_head.weight"], model.module.lm_head.weight)
    assert policy_tensors(model, "").keys() == tiny_qwen3().state_dict().keys()


def test_module_paths_resolve_inside_ddp_wrapper(one_rank: None) -> None:
    model = DistributedDataParallel(tiny_qwen3())
    for prefix in ("", "module."):
        paths = ModulePaths(
            decoder_layers=f"{prefix}model.layers",
            lm_head=f"{prefix}lm_head",
            final_norm=f"{prefix}model.norm",
        )
        found = find_modules(model, paths)
        assert found.decoder is model.module.model
        assert found.lm_head is model.module.lm_head


def test_fsdp1_and_late_sharding_refused(one_rank: None) -> None:
    model = tiny_qwen3()
    modules = find_modules(model, ModulePaths())
    fully_shard(model)
    with pytest.raises(RefusedError, match="sharded or resized after the bridge was built"):
        PolicyMatrices(modules).snapshot(session_of(modules), 1)
    gathered = dict(tiny_qwen3().state_dict())
    flat = FullyShardedDataParallel(tiny_qwen3(), device_id=torch.device("cpu"))
    with pytest.raises(RefusedError, match="fully_shard"):
        find_modules(flat, ModulePaths())
    # What the loop has gathered of it is pushed all the same.
    assert policy_tensors(gathered, "", flat).keys() == gathered.keys()


def test_experts_of_wrapped_policy_pushed_as_checkpoint(one_rank: None) -> None:
    stored = policy_tensors(qwen3_moe(), "").keys()
    assert policy_tensors(DistributedDataParallel(qwen3_moe()), "").keys() == stored
    model = qwen3_moe()
    fully_shard(model)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert gathered.keys() != stored
    for source in (model, gathered):
        assert policy_tensors(source, "", model).keys() == stored


def nothing(weight: torch.nn.Parameter) -> None:
    """Leave nothing, as DeepSpeed ZeRO-3 between the passes."""
    weight.data = torch.empty(0)


def a_shard(weight: torch.nn.Parameter) -> None:
    """Leave a shard, as FSDP1 with ``use_orig_params``."""
    weight.data = weight.data.flatten()[:7].clone()


def no_memory(weight: torch.nn.Parameter) -> None:
    """Free the memory, as FSDP1 without ``use_orig_params``."""
    weight.untyped_storage().resize_(0)


def offloaded(weight: torch.nn.Parameter) -> None:
    """Offload it, as accelerate's ``device_map`` and ``cpu_offload`` between the passes."""
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.to("meta")))


@pytest.mark.parametrize("shard", [nothing, a_shard, no_memory, offloaded])
@pytest.mark.parametrize("lead", [True, False])
def test_lm_head_sharded_after_start_turns_capture_off(
    trainer: FakeTrainer, connect: Connect, shard: Callable[[torch.nn.Parameter], None], lead: bool
) -> None:
    model = make_model()
    bridge = connect(model=model)
    shard(model.lm_head.weight)
    sync(bridge, 1, lead=lead)
    assert bridge.policy_version == 1
    reason = bridge.stats().capture_off_reason
    assert reason.startswith(f"model: found lm_head {list(model.lm_head.weight.shape)}, sharded")
    assert "ZeRO-3 and FSDP1 cannot be captured" in reason
    assert isinstance(bridge.capture(), NullCapture)


def test_policy_spec_keeps_shapes_found_at_start() -> None:
    model = make_model()
    modules = find_modules(model, ModulePaths())
    nothing(model.lm_head.weight)
    spec = modules.spec("")
    assert (spec.vocab_size, spec.hidden_size) == (VOCAB, HIDDEN)


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        ColwiseParallel(output_layouts=Replicate()),
    ],
    ids=["sharded", "gathered"],
)
def test_tensor_parallel_lm_head_turns_capture_off(
    one_rank: None, trainer: FakeTrainer, connect: Connect, style: ColwiseParallel
) -> None:
    model, data = make_model(), batch((9, 5))
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"lm_head": style})
    bridge = connect(model=model, version=1)
    deliver(bridge, model, data)
    assert bridge.stats().capture_off_reason.startswith("model: found a DTensor")
    assert hooks_on(model) == hooks_on(model.model) + 2  # those of the parallel style
    # It is the policy itself: no later window tries again.
    assert isinstance(bridge.capture(), NullCapture)
    assert bridge.stats().captures_refused == 1 and not trainer.samples


def test_states_on_several_devices_turn_capture_off(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = ForwardTap.take

    def spread(self: ForwardTap) -> ForwardStates | None:
        states = take(self)
        assert states is not None
        return replace(states, aux=tuple(aux.to("meta") for aux in states.aux))

    monkeypatch.setattr(ForwardTap, "take", spread)
    model, data = make_model(), batch((9, 5))
    bridge = connect(model=model, version=1)
    ship(bridge, model, data)
    assert bridge.stats().capture_off_reason.startswith("model: found states on ['cpu', 'meta']")
    assert isinstance(bridge.capture(), NullCapture)


@pytest.mark.parametrize(("backends", "device"), [("cpu:gloo,meta:x", "cpu"), ("meta:x", "meta")])
def test_cpu_offloaded_shards_gathered_on_mesh_device(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, backends: str, device: str
) -> None:
    """The policy is offloaded to the CPU, with NCCL alone or with gloo beside it."""
    model = tiny_qwen3()
    fully_shard(model)
    monkeypatch.setattr(DeviceMesh, "device_type", "meta")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    whole = full_tensor(model.lm_head.weight)
    assert (whole.device.type, whole.shape) == (device, model.lm_head.weight.shape)


def test_rank_out_of_memory_while_gathering_ends_sync(
    one_rank: None, trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in the collective call: it must not go on without them."""

    def full(_: torch.Tensor) -> torch.Tensor:
        raise shortage("beside the allocator")

    model = make_model()
    fully_shard(model)
    bridge = connect(model=model)
    with monkeypatch.context() as patched:
        patched.setattr(session, "full_tensor", full)
        with pytest.raises(MemoryError, match="free memory before it"):
            sync(bridge, 1)
    sync(bridge, 1)
    deliver(bridge, model, batch((9, 7)))
    assert bridge.stats().accepted == 2


@pytest.mark.parametrize("alone", [False, True])
def test_fsdp_cast_logits_keep_dtype_that_rounded_them(one_rank: None, alone: bool) -> None:
    """NeMo RL's DTensor worker has float32 weights, bfloat16 products, float32 results."""
    model, data = make_model(), batch((9, 7))
    kept = {"param_dtype": torch.bfloat16, "output_dtype": torch.float32}
    parts = [*model.model.layers, *([model.lm_head] if alone else []), model]
    for part in parts:
        fully_shard(part, mp_policy=MixedPrecisionPolicy(**kept))
    windows = Windows(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), windows.open() as capture:
        assert model(data["input_ids"]).logits.dtype == torch.float32
        capture.ship(data["input_ids"], loss_mask=data["loss_mask"])
    assert len(windows.samples) == 2
    for sample in windows.samples:
        assert dtype_from_wire(sample.header.logits_dtype, "logits_dtype") == torch.bfloat16


@pytest.mark.parametrize("given", [(), ("logprobs",), ("logprobs", "logits")])
def test_logits_scaled_in_place_by_loop_are_not_shipped(given: tuple[str, ...]) -> None:
    model, data = make_model(), batch((9, 7))
    windows = Windows(model)
    capture = windows.open(temperature=0.5)
    # As where the weights cannot be read later: the numbers come from the pass's own logits.
    capture._needs_logits_now = lambda device: True  # type: ignore[method-assign]
    with torch.no_grad(), capture:
        logits = model(data["input_ids"], attention_mask=data["attention_mask"]).logits
        own = picked_logits(logits, data["input_ids"], LogitForm())
        logits.div_(0.5)
        if given:
            numbers = {"logits": own, "logprobs": own - 9.0}
            capture.ship(**data, **{f"sampled_{name}": numbers[name] for name in given})
        else:
            with pytest.raises(RefusedError, match="written in place between"):
                capture.ship(**data)
    assert len(windows.samples) == (2 if given else 0)
    if given:
        assert torch.equal(windows.of_row(data, 0).sampled_logits[1:], own[0, 1:9])
        assert torch.equal(windows.of_row(data, 1).sampled_logprobs[1:], own[1, 1:7] - 9.0)


def test_second_lm_head_call_is_not_the_pass() -> None:
    model, data = make_model(), batch((9, 7))
    windows = Windows(model)
    capture = windows.open()
    capture._needs_logits_now = lambda device: True  # type: ignore[method-assign]
    with torch.no_grad(), capture:
        logits = model(data["input_ids"], attention_mask=data["attention_mask"]).logits
        own = picked_logits(logits, data["input_ids"], LogitForm())
        model.lm_head(torch.ones(*data["input_ids"].shape, model.config.hidden_size))
        logits.div_(0.5)
        capture.ship(**data, sampled_logprobs=own - 9.0)
    assert torch.equal(windows.of_row(data, 0).sampled_logits[1:], own[0, 1:9])


def scaled_in_place(bridge: PolicyBridge, model: torch.nn.Module, data: Batch) -> list[Record]:
    """One window at temperature 0.5; what it held before its end."""
    with torch.no_grad(), bridge.capture(temperature=0.5) as capture:
        logits = model(data["input_ids"], attention_mask=data["attention_mask"]).logits
        own = own_logprobs(logits.div_(0.5), data["input_ids"])
        capture.ship(**data, sampled_logprobs=own)
        held = list(capture._records)  # type: ignore[union-attr]
    assert bridge.flush(DEADLINE)
    return held


def test_logits_scaled_in_place_by_loop_are_compared_once(
    one_rank: None, trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data, asked, of = make_model(), batch((9, 7)), [], ReturnedLogits.of
    fully_shard(model)
    monkeypatch.setattr(ReturnedLogits, "of", lambda *given: asked.append(1) or of(*given))
    bridge = connect(model=model, version=1)
    (record,) = scaled_in_place(bridge, model, data)
    assert bridge._probed and len(asked) == 2
    # They are as large as the vocabulary, and counted nowhere.
    assert record.states.returned is None and record.states.head is None
    scaled_in_place(bridge, model, data)
    assert len(asked) == 2
    assert bridge.stats().accepted == 4


def test_wrong_logit_scale_refused_where_loop_scales_in_place(
    one_rank: None, trainer: FakeTrainer, connect: Connect
) -> None:
    model = make_model()
    fully_shard(model)
    bridge = connect(model=model, version=1, logit_scale=2.0)
    scaled_in_place(bridge, model, batch((9, 7)))
    assert bridge.stats().capture_off_reason.startswith("model.logits: found logits that differ")
    assert not trainer.samples


def test_fused_loss_of_sharded_policy_refused(
    one_rank: None, trainer: FakeTrainer, connect: Connect
) -> None:
    """Nobody calls lm_head, and a rank has a part of its weight: log-probs are not enough."""
    model, data = make_model(), batch((9, 7))
    fully_shard(model)
    model.forward = lambda *given, **named: model.model(*given, **named)
    bridge = connect(model=model, version=1, modules=ModulePaths(final_norm="model.norm"))
    with torch.no_grad(), bridge.capture() as capture:
        model(data["input_ids"], attention_mask=data["attention_mask"])
        capture.ship(**data, sampled_logprobs=torch.full((2, 8), -2.0))
    assert bridge.stats().capture_off_reason.startswith("sampled_logits: found not given")
    assert bridge.flush(DEADLINE) and not trainer.samples


WRITES: dict[str, Callable[[torch.nn.Module], object]] = {
    "added": lambda model: model.lm_head.weight.add_(1.0),
    "copied": lambda model: model.lm_head.weight.copy_(model.lm_head.weight.clone()),
    "to the shard": lambda model: model.lm_head.weight.to_local().add_(1.0),
    "loaded": lambda model: model.load_state_dict(model.state_dict()),
}


@pytest.mark.parametrize("write", WRITES)
def test_shards_written_without_step_count_as_moved(one_rank: None, write: str) -> None:
    model, data = tiny_qwen3(), batch((9, 7))
    fully_shard(model)
    moved = watched(find_modules(model, ModulePaths()).weights())
    for move in (torch.clone, torch.Tensor.cpu):  # as to another device, and where it is
        model(data["input_ids"]).logits.sum().backward()
        model.zero_grad()
        model._apply(move)
        assert not moved()
    with torch.no_grad():
        WRITES[write](model)
    assert moved()
    model._apply(torch.clone)
    assert moved()


@pytest.mark.parametrize("run", [False, True], ids=["at once", "after a pass"])
def test_step_on_shards_assigned_after_start_is_seen(
    one_rank: None, connect: Connect, run: bool
) -> None:
    """A resumed job's ``load_state_dict(assign=True)`` leaves them so."""
    model, data = make_model(), batch((9, 7))
    fully_shard(model)
    bridge = connect(model=model)
    given = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(given, assign=True)
    optimizer = torch.optim.AdamW(model.parameters())
    sync(bridge, 1)
    if run:
        # It leaves gathered parameters in the places of the shards: those found last stay.
        ship(bridge, model, data)
        sync(bridge, 2)
    model(data["input_ids"]).logits.sum().backward()
    optimizer.step()
    ship(bridge, model, data)
    assert bridge.stats().shed == {"policy_moved": 2}
