"""A standby copy is, once swapped in, the draft that vLLM's own reload would have made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rollout_server.control.changes import Change
from rollout_server.control.stages import WeightSource
from rollout_server.vllm.reload import LiveModel, apply_all
from rollout_server.vllm.standby import ASLEEP, DIFFERS, READY, SAME
from rollout_server.vllm.swap import NotSwappableError, StandbyCopy, pairs_of, swap_contents
from rollout_server.vllm.worker import WorkerHooks, slipstream_read_back, watch_sleep
from tests.rollout_server.drafts import (
    Drafts,
    check_failed_commits,
    check_swaps,
    different,
    join,
    prepared,
    ready,
    torn_weights,
)

pytestmark = pytest.mark.contract("lossless")


def test_swap_equals_reload(drafts: Drafts) -> None:
    expected = []
    for release in range(3):
        drafts.reload(release)
        expected.append(drafts.outputs())
    assert len(different(expected[0], expected[1])) >= 6
    drafts.reload(0)
    check_swaps(drafts, expected, drafts.draft.model.norm.weight)  # type: ignore[arg-type,union-attr]


def test_failed_commit_reverts_draft(drafts: Drafts) -> None:
    drafts.reload(0)
    check_failed_commits(drafts)


@pytest.mark.parametrize("size", [8, 1 << 15], ids=["copied", "memory exchanged"])
def test_swap_exchanges_tied_tensors_once(size: int) -> None:
    """Swapped again under its second name, a tied matrix of the draft would be the old one."""
    live, standby = torch.arange(2.0 * size)[::2], torch.full((2 * size,), -1.0)[::2]
    tied, tied_standby, expected = live.data, standby.data, live.clone()
    swap_contents([(live, standby), (tied, tied_standby)])
    for one, other in ((live, standby), (tied, tied_standby)):
        assert bool((one == -1).all()) and torch.equal(other, expected)
    live[0] = 5.0
    assert tied[0] == 5.0, "it is still one tensor"


class Layer(nn.Module):
    """A draft of one layer, whose loader writes to the layer and not to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.weight.weight_loader = self.load_weight  # type: ignore[attr-defined]

    def load_weight(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        self.weight.data.copy_(loaded)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter: Any = getattr(self, name)
            parameter.weight_loader(parameter, tensor)


@pytest.mark.parametrize("recorded", [True, False])
def test_standby_copy_loads_through_its_own_layers(recorded: bool) -> None:
    """Through those of the live draft a stage would change the draft that is being served."""
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    live = Layer()
    if recorded:
        record_metadata_for_reloading(live)
    copy = StandbyCopy(nn.Module(), live)
    copy.load([("weight", torch.ones(4))])
    assert not live.weight.any()
    [(mine, standby)] = copy.pairs()
    assert mine is live.weight and bool((standby == 1).all())


def test_prepare_refuses_checkpoint_without_part_of_matrix(drafts: Drafts, tmp_path: Path) -> None:
    """The missing part of a fused matrix would be served as zeros."""
    weights = {n: t for n, t in drafts.sources[1].weights() if "v_proj" not in n}
    assert len(weights) == len([*drafts.sources[1].weights()]) - 1
    save_file(weights, tmp_path / "model.safetensors")
    standby, partial = drafts.standby(), WeightSource(str(tmp_path))
    assert "elements are in no tensor of the checkpoint" in prepared(standby, partial)
    assert not standby.swap(partial, drafts.sources[0])


def test_replaced_draft_is_ready_to_swap_back(drafts: Drafts) -> None:
    """Small tensors are copied, large ones exchange their memory; both go both ways."""
    drafts.reload(0)
    standby = drafts.standby()
    zero, one, _ = drafts.sources
    ready(standby, one)
    with torch.no_grad():
        # A release's own norms: those of the test's checkpoints are all ones.
        for name, parameter in drafts.draft.named_parameters():
            if parameter.ndim == 1 and parameter.numel():
                parameter.fill_(1.0 + len(name) / 64)
    drafts.read_back.record()
    before = drafts.outputs()
    assert standby.swap(one, zero)
    join()
    assert standby.prepare(zero, None) == READY, "what was live was read, not loaded"
    assert standby.swap(zero, one)
    assert not different(drafts.outputs(), before)


def test_standby_keeps_at_most_two_copies(drafts: Drafts) -> None:
    standby = drafts.standby()
    zero, one, two = drafts.sources
    for source in (one, two, zero):
        ready(standby, source, keep=one)
    assert [standby.swap(two, zero), standby.swap(one, zero)] == [False, True]
    assert not standby.swap(two, one)
    ready(standby, zero)
    assert standby.swap(zero, one)
    # The same once more repairs the memory: what it replaces is not kept.
    ready(standby, zero)
    standby.drop()
    ready(standby, zero)
    assert standby.swap(zero, zero) and not standby.swap(zero, zero)


def test_dropped_standby_copy_frees_memory_at_once(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM freezes Python's collector: what waits for it stays on the device."""
    held: list[list[weakref.ref[torch.Tensor]]] = []
    original = StandbyCopy.load

    def load(copy: StandbyCopy, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            original(copy, weights)
        finally:
            own = [p for _, module in copy.modules for p in module._parameters.values()]
            held.append([weakref.ref(p) for p in own if p is not None])

    def alive() -> list[bool]:
        return [any(tensor() is not None for tensor in copy) for copy in held]

    monkeypatch.setattr(StandbyCopy, "load", load)
    drafts.reload(0)
    standby = drafts.standby()
    zero, one, two = drafts.sources
    gc.disable()
    try:
        for new, old in ((one, zero), (two, one), (zero, two)):
            ready(standby, new, keep=old)
            assert standby.swap(new, old)
            join()
        assert alive() == [False, False, True], "only what was live last is kept"
        prepared(standby, torn_weights(drafts), keep=two)
        assert alive() == [False, False, True, True]
        standby.drop()
        assert alive() == [False] * 4
    finally:
        gc.enable()


def test_overwritten_draft_is_not_swapped_back(drafts: Drafts) -> None:
    drafts.reload(1)
    first = drafts.outputs()
    standby = drafts.standby()
    zero, one, _ = drafts.sources
    ready(standby, zero)
    drafts.reload(2)  # as a framework does that updates the draft by itself
    assert drafts.read_back.check() == DIFFERS
    assert standby.swap(zero, one) and drafts.read_back.check() == SAME
    ready(standby, one)
    assert standby.swap(one, zero)
    assert not different(drafts.outputs(), first)


def test_commit_heals_lost_draft_vocabulary(drafts: Drafts) -> None:
    drafts.reload(0)
    before, zero = drafts.outputs(), drafts.sources[0]
    d2t = drafts.draft.draft_id_to_target_id
    assert bool((d2t > 0).any())  # type: ignore[operator]
    standby = drafts.standby()
    with torch.no_grad():
        d2t.zero_()  # type: ignore[operator,union-attr]
        drafts.draft.model.norm.weight.zero_()  # type: ignore[union-attr,operator]
    drafts.read_back.lost = True
    ready(standby, zero)
    assert drafts.commit(zero, zero, standby).error == ""
    assert not different(drafts.outputs(), before) and drafts.read_back.check() == SAME


@pytest.mark.parametrize("end", [OSError, IndexError])
def test_interrupted_reload_restores_old_weights(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch, end: type[Exception]
) -> None:
    drafts.reload(0)
    before = drafts.outputs()
    load_weights, calls = drafts.draft.load_weights, []

    def torn(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        calls.append(list(weights))
        if len(calls) == 1:
            # Part of a fused matrix: what of it was loaded must not count for the old one.
            load_weights([(n, t) for n, t in calls[0] if "v_proj" not in n])  # type: ignore[operator]
            raise end("the rest is gone")
        load_weights(calls[-1])  # type: ignore[operator]

    monkeypatch.setattr(drafts.draft, "load_weights", torn)
    zero, one, _ = drafts.sources
    with drafts.current():
        live = LiveModel(drafts.draft, drafts.model_config)
        result = apply_all([(Change("draft", one, zero), live)])
    assert "the rest is gone" in result.error and result.restored and len(calls) == 2
    assert not any(parameter.is_meta for parameter in drafts.draft.parameters())
    assert not different(drafts.outputs(), before)


def test_failed_external_policy_is_not_received_again() -> None:
    """Nobody sends the old one, and an update may read the same at every step."""
    external, received = WeightSource(transfer="{}"), []

    def receive(transfer: str) -> None:
        received.append(transfer)
        if len(received) == 1:
            raise OSError("the sender is gone")

    policy = nn.Linear(2, 2)
    policy.load_weights = list  # type: ignore[assignment]
    live = LiveModel(policy, None, receive=receive)  # type: ignore[arg-type]
    result = apply_all([(Change("policy", external, external), live)])
    assert len(received) == 1 and not result.restored
    assert "the sender is gone" in result.error and "none are held here" in result.error


def test_prepare_says_why_it_failed(drafts: Drafts, tmp_path: Path) -> None:
    standby = drafts.standby()
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "empty" / "model.safetensors")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "training_args.bin").touch()
    for source, why in (
        (torn_weights(drafts), "No such file"),
        (WeightSource(str(tmp_path / "none")), "no such folder"),
        (WeightSource(str(tmp_path / "empty")), "no tensor"),
        (WeightSource(str(tmp_path / "pickled")), "a pickle"),
    ):
        assert why in prepared(standby, source)
        assert not standby.swap(source, drafts.sources[0])
    with pytest.raises(NotSwappableError, match="verifier's memory"):
        other = nn.Module()
        other.lm_head = nn.Module()
        other.lm_head.weight = drafts.draft.lm_head.weight  # type: ignore[union-attr]
        StandbyCopy(other, drafts.draft)


def test_swap_refuses_modules_that_do_not_correspond() -> None:
    live, copy = nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False)
    with pytest.raises(NotSwappableError, match="shape"):
        pairs_of([(live, copy)])
    copy = nn.Linear(4, 4, bias=False)
    live.cpu_linear = lambda x, weight, bias: x  # type: ignore[assignment]
    copy.cpu_linear = lambda x, weight, bias: x  # type: ignore[assignment]
    with pytest.raises(NotSwappableError, match="packed in another way"):
        pairs_of([(live, copy)])


class Worker:
    """vLLM's, as far as sleeping and its models go."""

    def __init__(self) -> None:
        self.policy = nn.Linear(4, 4)
        self.draft = nn.Linear(4, 4)
        self.draft.embed_tokens = self.policy  # type: ignore[assignment]
        self.slipstream_hooks = WorkerHooks(self)

    def get_model(self) -> nn.Module:
        return self.policy

    def get_draft_model(self) -> nn.Module:
        return self.draft

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...


def test_read_back_sees_written_draft_not_pushed_policy() -> None:
    worker = Worker()
    state = worker.slipstream_hooks.read_back
    with torch.no_grad():
        worker.policy.weight.add_(1.0)
    assert state.check() == SAME
    with torch.no_grad():
        worker.draft.weight[2, 1] = -worker.draft.weight[2, 1]
    assert state.check() == DIFFERS
    state.record()
    assert state.check() == SAME


def test_draft_preserved_over_sleep_level_2_reads_back_same() -> None:
    class Keeper(Worker):
        """A worker with ``sleep_preserve_parameter_names``."""

    watch_sleep(Keeper)
    worker = Keeper()
    before = worker.draft.weight.clone()
    worker.sleep(2)
    worker.wake_up()
    assert torch.equal(worker.draft.weight, before)
    assert slipstream_read_back(worker) == SAME


def test_draft_is_lost_in_sleep_level_2_not_level_1() -> None:
    class Sleeper(Worker):
        def sleep(self, level: int = 1) -> None:
            if level == 2:
                for parameter in self.draft.parameters():
                    floating = parameter.is_floating_point()
                    parameter.data.fill_(float("nan") if floating else 77)

    watch_sleep(Sleeper)
    worker = Sleeper()
    d2t = worker.draft.d2t = nn.Parameter(torch.arange(4), requires_grad=False)
    state = worker.slipstream_hooks.read_back
    state.record()
    worker.sleep(1)
    assert slipstream_read_back(worker) == ASLEEP
    worker.wake_up(["kv_cache"])
    assert slipstream_read_back(worker) == ASLEEP
    worker.wake_up(["weights"])
    assert slipstream_read_back(worker) == SAME
    worker.sleep(2)
    assert d2t.tolist() == [77] * 4
    worker.wake_up(["kv_cache"])
    worker.wake_up(["weights"])
    assert d2t.tolist() == [0, 1, 2, 3], "an offset of lost memory would end the engine"
    # vLLM would emit wrong tokens for drafts whose logits are NaN.
    assert not any(t.any() for t in (worker.draft.weight, worker.draft.bias))
    assert bool(worker.policy.weight.isnan().all()), "the verifier is another's to put right"
    assert slipstream_read_back(worker) == DIFFERS
    state.record()
    assert slipstream_read_back(worker) == SAME
