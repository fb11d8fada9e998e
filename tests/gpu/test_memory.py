"""A GPU that is short of memory, emulated: the error that torch raises, at a size of our choice."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_trainer.config import TrainingConfig
from draft_trainer.counters import Counters, total
from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.loss import chunks
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.releases.gate import PASS_TOKENS, Gate
from draft_trainer.training import learner as learner_module
from draft_trainer.training.learner import Learner
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.rig import feeding, make_config, rollouts, train_until_released
from tests.draft_trainer.synthetic import Policy, head
from tests.gpu.shortages import SHORTAGES, shortage

CONFIG = TrainingConfig(ttt_steps=3, warmup_steps=0, forward_tokens=400)


class Device:
    """Has room for passes of ``most`` tokens.

    Attributes:
        most: the same.
        kind: of its errors.
        refused: tokens of every pass that was too long.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = math.inf
        self.kind = "allocator"
        self.refused: list[int] = []
        self._objective = learner_module.ttt_objective
        monkeypatch.setattr(learner_module, "ttt_objective", self._pass)

    def _pass(self, draft: Any, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        outcome = self._objective(draft, batch, *args, **kwargs)
        if batch.token_ids.numel() > self.most:
            # After the work: part of the gradients may be there already.
            outcome.loss.backward()
            self.refused.append(batch.token_ids.numel())
            raise shortage(self.kind)
        return outcome


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.mark.parametrize("kind", ["allocator", "handle"])
def test_step_out_of_memory_is_retried_by_halves(device: Device, kind: str) -> None:
    policy, device.kind = Policy(), kind
    samples = policy.samples(40)
    whole, halved = Learner(head(0), CONFIG), Learner(head(0), CONFIG)
    expected = whole.step(samples, policy.heads())
    device.most = 200
    metrics = halved.step(samples, policy.heads())
    assert (expected.memory_retries, metrics.memory_retries) == (0, 1)
    assert len(device.refused) == 1 and 200 < device.refused[0] <= 400
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-6)
    assert metrics.anchors == expected.anchors
    for ours, theirs in zip(halved.head.parameters(), whole.head.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    # The next step begins with what was found to fit, and passes grow back.
    assert halved.step(samples, policy.heads()).memory_retries == 0
    device.most = math.inf
    for _ in range(64):
        halved.step(samples[:2], policy.heads())
    device.most = 200
    assert halved.step(samples, policy.heads()).memory_retries == 1


def test_step_without_memory_changes_nothing(device: Device) -> None:
    policy = Policy()
    learner = Learner(head(0), CONFIG)
    before = learner.state_dict()
    device.most = 10
    with pytest.raises(RefusedError, match=r"too little for 200 tokens") as refused:
        learner.step(policy.samples(40), policy.heads())
    assert refused.value.reason == release_pb2.REFUSAL_REASON_DEVICE_MEMORY
    assert len(device.refused) == 2
    assert all(torch.equal(before[name], value) for name, value in learner.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.head.parameters())
    device.most = math.inf
    assert not learner.step(policy.samples(40), policy.heads()).skipped


def test_second_try_names_forgotten_policy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are too old then, and no memory is waited for."""
    policy = Policy()
    learner, heads = Learner(head(0), CONFIG), policy.heads()
    before = learner.state_dict()

    def short(*_: object) -> None:
        monkeypatch.setattr(heads, "get", PolicyHeads(1).get)
        raise shortage("full")

    with monkeypatch.context() as patch, pytest.raises(RefusedError, match="policy_version"):
        patch.setattr(learner, "_backward", short)
        learner.step(policy.samples(40), heads)
    assert all(torch.equal(before[name], value) for name, value in learner.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.head.parameters())


def test_samples_without_page_locked_memory_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, learner = Policy(), Learner(head(0), CONFIG)
    before = learner.state_dict()

    def short(*_: object) -> None:
        raise shortage("page-locked")

    with monkeypatch.context() as patch:
        patch.setattr("draft_trainer.drafters.batch._collate", short)
        with pytest.raises(RefusedError, match="too little page-locked memory") as refused:
            learner.step(policy.samples(40), policy.heads())
    assert refused.value.reason == release_pb2.REFUSAL_REASON_DEVICE_MEMORY
    assert all(torch.equal(before[name], value) for name, value in learner.state_dict().items())
    assert not learner.step(policy.samples(40), policy.heads()).skipped


def test_memory_shortage_leaves_no_tiny_passes(device: Device) -> None:
    """Every step begins at the size that was too much for the one before it."""
    policy, said = Policy(), list[object]()
    learner = Learner(head(0), CONFIG)
    device.most = 10
    for _ in range(5):
        with pytest.raises(RefusedError) as refused:
            learner.step(policy.samples(40), policy.heads())
        said.append(refused.value.found)
    assert said == [f"too little for {tokens} tokens" for tokens in (200, 100, 50, 50, 50)]


def test_trainer_waits_for_device_memory(tmp_path: Path, device: Device) -> None:
    """The trainer lives, says so, and trains every sample as often as it would have."""
    device.most, device.kind = 0, "handle"
    with feeding(make_config(tmp_path)) as (server, client):
        client.send(*rollouts(40))
        status = client.wait_for(lambda s: s.training_error)
        assert "training waits" in status.training_error
        assert status.training_waits_for == release_pb2.REFUSAL_REASON_DEVICE_MEMORY
        assert status.train_steps == 0
        assert total(server._counters.device_memory) >= 1
        device.most = math.inf
        status = client.wait_for(lambda s: s.train_steps >= 1 and s.idle)
        assert status.training_error == "" and status.samples_pending == 0
        trained = total(server._counters.samples_trained)
        assert trained == 2 * (status.samples_accepted - status.samples_held_out)
        assert not server.died.is_set()


@pytest.mark.parametrize("kind", SHORTAGES)
@pytest.mark.parametrize(("most", "outcome", "count"), [(PASS_TOKENS // 2, 1.0, 1), (1, None, 2)])
def test_gate_out_of_memory_halves_its_pass(
    most: int, outcome: float | None, count: int, kind: str
) -> None:
    counters = Counters()
    gate = Gate(*[SimpleNamespace()] * 3, counters, lambda: (3, "greedy"))  # type: ignore[arg-type]

    def measured(tokens: int) -> float:
        if tokens > most:
            raise shortage(kind)
        return 1.0

    assert gate._with_room(measured) == outcome
    assert counters.device_memory.labels("gate")._value.get() == count


def test_release_without_device_memory_is_left_to_the_next_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidate passed in the gate, and cannot be copied for its release."""
    with feeding(make_config(tmp_path)) as (server, client):
        learner, gate, full = server.loop.learner, server.loop.gate, threading.Event()
        judge, snapshot, passed = gate.judge, learner.snapshot, list[str]()

        def judged(*given: Any) -> Any:
            result = judge(*given)
            if result[0].outcome == "passed":
                passed.append("passed")
                if len(passed) == 1:
                    full.set()
            return result

        def short_once(**options: Any) -> Any:
            if full.is_set():
                full.clear()
                raise shortage("beside the allocator")
            return snapshot(**options)

        monkeypatch.setattr(gate, "judge", judged)
        monkeypatch.setattr(learner, "snapshot", short_once)
        assert train_until_released(client) == 1
        assert len(passed) == 2 and not server.died.is_set()
        (failed,) = [v for v in server.status.verdicts() if v.outcome == "write_failed"]
        assert "too little device memory: CUDA error: out of memory" in failed.reason


GIB = 1 << 30


def _like_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, free: float, reserved: float, allocated: float, share: float
) -> Any:
    """Stand for a tensor on a GPU of 80 GiB; the others are GiB, and ``gpu_memory_fraction``."""
    for name, found in (
        ("mem_get_info", (int(free * GIB), 80 * GIB)),
        ("memory_reserved", int(reserved * GIB)),
        ("memory_allocated", int(allocated * GIB)),
        ("get_per_process_memory_fraction", share),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda of, found=found: found)
    return SimpleNamespace(is_cpu=False, is_cuda=True, device=torch.device("cuda", 0))


def test_chunks_keep_within_gpu_memory_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    like = _like_on_a_gpu(monkeypatch, free=60, reserved=7, allocated=6, share=0.1)
    # Of 8 GiB one is not taken yet, and one is taken and unused: an eighth of both.
    assert next(chunks(1 << 20, 1 << 20, like)) == slice(0, 256)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda of: 1.0)
    assert next(chunks(1 << 20, 1 << 20, like)) == slice(0, 512)


def test_chunks_have_a_floor_on_a_full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are those of K = 5 and a draft vocabulary of 32,768: an eighth of 0.1 GiB holds 34."""
    row, rows = 6 * 32768 * 2, 16_384
    like = _like_on_a_gpu(monkeypatch, free=0.1, reserved=20, allocated=20, share=1.0)
    with pytest.raises(torch.OutOfMemoryError, match=r"room for 34 rows .* expected 256"):
        next(chunks(rows, row, like, 256))
    # Fewer rows need no more than there are; the gate has no gradient to add to.
    assert next(chunks(30, row, like, 256)) == slice(0, 30)
    assert next(chunks(rows, row, like)) == slice(0, 34)
    like = _like_on_a_gpu(monkeypatch, free=0.76, reserved=20, allocated=20, share=1.0)
    assert next(chunks(rows, row, like, 256)) == slice(0, 259)
    # Of longer rows an empty one takes fewer at a time, too.
    like = _like_on_a_gpu(monkeypatch, free=60, reserved=20, allocated=20, share=1.0)
    assert next(chunks(rows, 8 * 151_936 * 2, like, 256)) == slice(0, 220)
