"""The free memory of the device: emulated, with CUDA tensors that have no memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rollout_server.control.changes import Change, Result
from rollout_server.control.stages import WeightSource
from rollout_server.vllm import swap, worker
from rollout_server.vllm.standby import READY, SAME, WORKING, Standby
from rollout_server.vllm.swap import element_hash, free_bytes, must_pin, swap_contents
from rollout_server.vllm.worker import (
    SLEEPS,
    owed_bytes,
    reserve_standby,
    slipstream_apply,
    slipstream_prepare,
    slipstream_read_back,
    watch_sleep,
)
from slipstream.errors import RefusedError
from tests.rollout_server.drafts import join, ready

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A GPU's numbers: what the driver has free, what torch keeps, and its segments."""
    numbers = types.SimpleNamespace(free=0, reserved=0, segments=[])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (numbers.free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: numbers.reserved)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: numbers.segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return numbers


def segment(total: int, active: int, pool: tuple[int, int] = (0, 0), on: int = 0) -> dict[str, Any]:
    """One of torch's, as far as is looked at."""
    found = {"total_size": total * MIB, "active_size": active * MIB}
    return {**found, "segment_pool_id": pool, "device": on}


def linear(size: int) -> nn.Linear:
    return nn.Linear(size, size, bias=False, dtype=torch.float32)


def a_worker(
    policy: nn.Module, draft: nn.Module | None, available: int, planned: bool = False
) -> Any:
    class Worker:
        requested_memory = 1000 * MIB
        device = CUDA
        cache_config = types.SimpleNamespace(kv_cache_memory_bytes=None)

        def determine_available_memory(self) -> int:
            if planned:
                self.cache_config.kv_cache_memory_bytes = available
            return available

        def get_model(self) -> nn.Module:
            return policy

        def get_draft_model(self) -> nn.Module | None:
            return draft

        def sleep(self, level: int = 1) -> None: ...

        def wake_up(self, tags: list[str] | None = None) -> None: ...

    reserve_standby(Worker)
    watch_sleep(Worker)
    return Worker()


@pytest.mark.parametrize("planned", [False, True])
def test_kv_cache_leaves_room_for_standby_copies(
    device: types.SimpleNamespace, planned: bool
) -> None:
    """Also where VLLM_ENABLE_STARTUP_PLAN puts a saved size in ``kv_cache_memory_bytes``."""
    policy, draft = linear(16), nn.Sequential(linear(1024), linear(512))
    draft.append(policy)  # As embed_tokens: the verifier's own.
    found = a_worker(policy, draft, 700 * MIB, planned)
    own = (4 + 1) * MIB
    assert found.determine_available_memory() == 700 * MIB - 2 * own
    # The engine may grow to its share without ours; what torch holds is a part of it already.
    device.reserved = 900 * MIB
    assert owed_bytes(found) == 100 * MIB - 2 * own
    device.reserved = 1000 * MIB
    assert owed_bytes(found) == 0

    assert a_worker(policy, None, 700 * MIB).determine_available_memory() == 700 * MIB
    given = a_worker(policy, draft, 700 * MIB)
    given.cache_config.kv_cache_memory_bytes = 700 * MIB
    assert given.determine_available_memory() == 700 * MIB


def test_standby_copy_is_pinned_when_device_is_full(
    device: types.SimpleNamespace,
) -> None:
    graphs, other = segment(400, 0, pool=(0, 1)), segment(400, 0, on=1)
    device.free, device.segments = 50 * MIB, [segment(20, 10), segment(10, 0), graphs, other]
    assert not must_pin(CUDA, 40 * MIB, lambda: 0)
    assert must_pin(CUDA, 41 * MIB, lambda: 0), "what torch keeps unused, the engine uses again"
    assert must_pin(CUDA, 16 * MIB, lambda: 31 * MIB)
    assert free_bytes(CUDA) == 70 * MIB
    assert not must_pin(torch.device("cpu"), 1 << 60, lambda: 0)


def test_free_bytes_with_cuda_malloc_async_are_the_drivers(
    device: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps no segments with PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync."""

    def memory_snapshot() -> list[dict[str, Any]]:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", memory_snapshot)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    device.free = 50 * MIB
    assert free_bytes(CUDA) == 50 * MIB


def test_policy_reload_refused_without_room_for_largest_layer(
    device: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = nn.Sequential(nn.Module(), nn.Module(), nn.Module())
    with FakeTensorMode():
        for module, size in zip(policy, (1024, 2048, 512), strict=True):
            module.weight = nn.Parameter(torch.empty(size, size, device=CUDA))
    device.free, device.segments = 15 * MIB, [segment(5, 5), segment(64, 0, pool=(0, 1))]
    config = types.SimpleNamespace(model_config=None, lora_config=None)
    server = types.SimpleNamespace(get_model=lambda: policy, vllm_config=config)
    loaded: list[object] = []
    monkeypatch.setattr("rollout_server.vllm.reload.load", lambda *given: loaded.append(given))
    change = Change("policy", WeightSource("/new"), WeightSource("/old")).to_message()
    answer = slipstream_apply(server, [change])
    assert "15728640 bytes free" in answer["error"] and "16777216 bytes" in answer["error"]
    assert answer["restored"] and loaded == [], "neither the new nor the old ones were touched"
    device.free += MIB
    worker.check_room(policy)
    with pytest.raises(RefusedError):
        device.free -= MIB
        worker.check_room(policy)
    # Two buffers, each with one tensor more than it holds, and the layer.
    server.weight_transfer_engine = types.SimpleNamespace(
        packed=True, packed_num_buffers=2, packed_buffer_size_bytes=4 * MIB
    )
    change = Change("policy", WeightSource(transfer="{}"), WeightSource("/old")).to_message()
    device.free = 55 * MIB
    answer = slipstream_apply(server, [change])
    assert f"{56 * MIB} bytes, for the largest layer once more and what" in answer["error"]


def test_room_check_counts_both_forms_of_quantized_layer(
    device: types.SimpleNamespace,
) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    policy = nn.Module()
    with FakeTensorMode():
        experts = torch.empty(2048, 2048, dtype=torch.float8_e4m3fn, device=CUDA)
        policy.weight = nn.Parameter(experts, requires_grad=False)
    as_loaded = torch.empty(2048, 2048, dtype=torch.bfloat16, device="meta")
    layerwise.get_layerwise_info(policy).restore_metadata = ({"weight": as_loaded}, {})
    device.free = 12 * MIB
    worker.check_room(policy)
    device.free -= 1
    with pytest.raises(RefusedError, match=str(12 * MIB)):
        worker.check_room(policy)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A worker with a draft on the GPU, whose reload needs 16 MiB."""
    policy, draft = nn.Module(), nn.Module()
    with FakeTensorMode():
        for module, size in ((policy, 4096), (draft, 2048)):
            module.weight = nn.Parameter(torch.empty(size, size, device=CUDA))
    draft.embed_tokens = policy  # The verifier's own: it is not reloaded.
    read_back = types.SimpleNamespace(committed={"w": 0}, lost=False, record=lambda hashes: None)
    standby = Standby(lambda: policy, lambda: draft, read_back)  # type: ignore[arg-type]
    settings = types.SimpleNamespace(draft_model_config=None)
    monkeypatch.setattr("vllm.config.set_current_vllm_config", contextlib.nullcontext)
    return types.SimpleNamespace(
        get_model=lambda: policy,
        get_draft_model=lambda: draft,
        vllm_config=types.SimpleNamespace(speculative_config=settings, lora_config=None),
        slipstream_hooks=types.SimpleNamespace(standby=standby),
        weight_transfer_engine=None,
    )


@pytest.mark.parametrize(("ready", "free"), [(False, 15), (False, 16), (True, 0)])
def test_draft_reload_refused_without_room_for_largest_layer(
    device: types.SimpleNamespace,
    server: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    ready: bool,
    free: int,
) -> None:
    monkeypatch.setattr(server.slipstream_hooks.standby, "is_ready", lambda source: ready)
    applied: list[object] = []

    def apply_all(changes: list[object]) -> Result:
        applied.extend(changes)
        return Result(0.0)

    monkeypatch.setattr(worker, "apply_all", apply_all)
    device.free = free * MIB
    change = Change("draft", WeightSource("/new"), WeightSource("/old")).to_message()
    answer = slipstream_apply(server, [change])
    if ready or free == 16:
        assert answer["error"] == "" and applied
    else:
        assert "16777216 bytes" in answer["error"] and answer["restored"] and not applied


def test_external_policy_is_applied_after_draft(
    device: types.SimpleNamespace, server: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[list[str]] = []

    def apply_all(changes: list[Any]) -> Result:
        applied.append([change.kind for change, _ in changes])
        return Result(0.0)

    monkeypatch.setattr(worker, "apply_all", apply_all)
    device.free, server.vllm_config.model_config = 64 * MIB, None
    draft = Change("draft", WeightSource("/new"), WeightSource("/old"))
    held, external = WeightSource("/policy"), WeightSource(transfer="{}")
    for new, old in ((external, held), (held, external)):
        slipstream_apply(server, [Change("policy", new, old).to_message(), draft.to_message()])
    assert applied == [["draft", "policy"]] * 2


class Copied:
    """A standby copy without tensors: what is read back is what was loaded."""

    device = torch.device("cpu")

    def __init__(self, *given: object) -> None:
        self.hashes: dict[str, int] = {}

    def load(self, weights: object) -> None:
        self.hashes = {"w": 1}

    def pairs(self) -> list[Any]:
        return []

    def read(self) -> dict[str, int]:
        return self.hashes


def test_undo_swaps_back_without_room_for_reload(
    device: types.SimpleNamespace, server: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old weights are still being read, as where another rank refused the new ones."""
    waited = threading.Event()

    class Slow(Copied):
        def read(self) -> dict[str, int]:
            assert waited.wait(60)
            return super().read()

    join_thread = threading.Thread.join

    def join_once_asked(thread: threading.Thread, timeout: float | None = None) -> None:
        waited.set()
        join_thread(thread, 60)

    monkeypatch.setattr("rollout_server.vllm.standby.StandbyCopy", Slow)
    change = Change("draft", WeightSource("/new"), WeightSource("/old"))
    ready(server.slipstream_hooks.standby, change.new)
    monkeypatch.setattr(threading.Thread, "join", join_once_asked)
    assert device.free == 0
    for each in (change, change.undone()):
        answer = slipstream_apply(server, [each.to_message()])
        assert (answer["error"], answer["restored"]) == ("", True)


def test_failed_standby_copy_frees_memory_for_reload(
    device: types.SimpleNamespace, server: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[Copied]] = []

    class Failing(Copied):
        def load(self, weights: object) -> None:
            held.append(weakref.ref(self))
            raise RuntimeError("out of memory")

    def mem_get_info(_: object) -> tuple[int, int]:
        return (0 if held[0]() else 16 * MIB), 80 << 30

    loaded: list[object] = []
    monkeypatch.setattr("rollout_server.vllm.standby.StandbyCopy", Failing)
    monkeypatch.setattr("rollout_server.vllm.reload.load", lambda *given: loaded.append(given))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    change = Change("draft", WeightSource("/new"), WeightSource("/old"))
    standby = server.slipstream_hooks.standby
    standby.read_back.record = lambda: None
    assert standby.prepare(change.new, None) == WORKING
    join()
    assert "out of memory" in standby.prepare(change.new, None)
    answer = slipstream_apply(server, [change.to_message()])
    assert (answer["error"], len(loaded)) == ("", 1)


@pytest.mark.parametrize("draft", [nn.Sequential(linear(32)), None], ids=["draft", "without"])
def test_sleeping_engine_refuses_apply_and_prepare(
    monkeypatch: pytest.MonkeyPatch, draft: nn.Module | None
) -> None:
    """Its addresses have no memory then: on a GPU a write ends the engine."""
    server = a_worker(linear(16), draft, 0)
    assert slipstream_read_back(server) == SAME, "as at the engine's start"
    touched: list[object] = []
    monkeypatch.setattr(worker, "apply_all", lambda changes: touched.append(changes))
    monkeypatch.setattr(swap.StandbyCopy, "__init__", lambda *given: touched.append(given))
    new, old = WeightSource("/new"), WeightSource("/old")
    server.sleep()
    for tags in (None, ["kv_cache"]):
        if tags:
            server.wake_up(tags)
        for kind in ("draft", "policy"):
            answer = slipstream_apply(server, [Change(kind, new, old).to_message()])
            assert (answer["error"], answer["restored"]) == (SLEEPS, True)
        assert slipstream_prepare(server, new.to_message(), None) == (SLEEPS if draft else READY)
    assert touched == []
    server.wake_up(["weights"])
    assert slipstream_read_back(server) == SAME


def test_standby_copies_share_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps what was freed on a stream for that stream: others would take memory anew."""
    made: list[torch.device] = []

    def stream(device: torch.device) -> types.SimpleNamespace:
        made.append(device)
        return types.SimpleNamespace(device=device, synchronize=lambda: None)

    copy = types.SimpleNamespace(device=CUDA, hashes={}, pairs=list, read=dict)
    copy.load = lambda weights: None
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr("rollout_server.vllm.standby.StandbyCopy", lambda *given: copy)
    read_back = types.SimpleNamespace(committed={}, lost=False, record=lambda hashes: None)
    copies = Standby(lambda: linear(4), lambda: linear(4), read_back)  # type: ignore[arg-type]
    releases = [WeightSource(str(n)) for n in range(10)]
    for old, new in itertools.pairwise(releases):
        ready(copies, new, keep=old)
        assert copies.swap(new, old)
        join()
    assert made == [CUDA]


def test_swap_synchronizes_device_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("quiet"))
    monkeypatch.setattr(swap, "_copy_both_ways", lambda one, other: order.append("copy"))
    pairs = [(torch.empty(4, device="meta"), torch.empty(4)) for _ in range(2)]
    swap_contents(pairs)
    assert order == ["quiet", "copy", "copy", "quiet"]
    swap_contents([(torch.zeros(4), torch.ones(4))])
    assert len(order) == 4


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("rows", [3, 700])
def test_element_hash_sees_values_and_order(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(rows, 333, generator=generator).to(dtype)
    if dtype == torch.bool:
        matrix = torch.randn(rows, 333, generator=generator) > 0
    before = element_hash(matrix)
    assert element_hash(matrix.clone()) == element_hash(matrix.t().contiguous().t()) == before
    assert element_hash(matrix.flip(0)) != before, "permuted rows"
    shards = matrix.split([100, 100, 133], 1)
    assert element_hash(torch.cat([shards[1], shards[0], shards[2]], 1)) != before
    changed = matrix.clone().view(torch.uint8)
    changed[-1, -1] ^= 1
    assert element_hash(changed.view(dtype)) != before
    one, five = (torch.full((rows, 332), value, dtype=torch.int32) for value in (1, 5))
    assert element_hash(one) != element_hash(five), "even counts of one value"
