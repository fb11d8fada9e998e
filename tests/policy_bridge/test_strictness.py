"""Bad input costs samples, never the training run; strict, it raises."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from policy_bridge import BridgeConfig, ModulePaths, PolicyBridge
from policy_bridge.capture import Capture, NullCapture
from policy_bridge.stats import Counters
from slipstream.errors import RefusedError

from .conftest import Connect, batch, deliver, make_model, ship, sync
from .doubles import DEADLINE, FakeTrainer

pytestmark = pytest.mark.contract("never waits")

Spoil = Callable[[torch.nn.Module, dict[str, torch.Tensor], Capture], None]


def run(
    model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture, **changes: object
) -> None:
    model(data["input_ids"], attention_mask=data["attention_mask"])
    capture.ship(**{**data, **changes})  # type: ignore[arg-type]


def wrong_mask(model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture) -> None:
    run(model, data, capture, loss_mask=data["loss_mask"][:, :-1])


def wrong_padding(model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture) -> None:
    gap = data["attention_mask"].clone()
    gap[0, 3] = 0
    run(model, data, capture, attention_mask=gap)


def wrong_logprobs(model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture) -> None:
    run(model, data, capture, sampled_logprobs=torch.zeros(2, 3))


def wrong_positions(
    model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture
) -> None:
    run(model, data, capture, position_ids=torch.full_like(data["input_ids"], 3))


def wrong_prompt_lengths(
    model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture
) -> None:
    run(model, data, capture, prompt_lengths=[1.0])


def listed_ids(model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture) -> None:
    run(model, data, capture, input_ids=data["input_ids"].tolist())


def listed_mask(model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture) -> None:
    run(model, data, capture, loss_mask=data["loss_mask"].tolist())


def listed_logprobs(
    model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture
) -> None:
    run(model, data, capture, sampled_logprobs=[[0.0] * 8] * 2)


def no_forward(model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture) -> None:
    capture.ship(**data)


def labels_for_ids(model: torch.nn.Module, data: dict[str, torch.Tensor], capture: Capture) -> None:
    run(model, data, capture, input_ids=data["input_ids"].masked_fill(~data["loss_mask"], -100))


LISTED = {"input_ids": listed_ids, "loss_mask": listed_mask, "sampled_logprobs": listed_logprobs}
CALLS = {
    "input_ids": labels_for_ids,
    "loss_mask": wrong_mask,
    "attention_mask": wrong_padding,
    "sampled_logprobs": wrong_logprobs,
    "position_ids": wrong_positions,
    "prompt_lengths": wrong_prompt_lengths,
    "capture.ship": no_forward,
}


@pytest.mark.parametrize("field", LISTED)
def test_lists_in_ship_cost_window(trainer: FakeTrainer, connect: Connect, field: str) -> None:
    model, data = make_model(), batch((8, 6))
    bridge = connect(model=model, strict=False, version=1)
    with torch.no_grad(), bridge.capture() as taken:
        LISTED[field](model, data, taken)  # type: ignore[arg-type]
    reason = bridge.stats().capture_off_reason
    assert reason.startswith(f"{field}: found list, expected a tensor")
    deliver(bridge, model, data)
    assert bridge.stats().capture_off_reason == "" and len(trainer.samples) == 2


@pytest.mark.parametrize("field", CALLS)
@pytest.mark.parametrize("strict", [False, True])
def test_invalid_ship_call_costs_window(
    trainer: FakeTrainer, connect: Connect, field: str, strict: bool
) -> None:
    model, data = make_model(), batch((8, 6))
    bridge = connect(model=model, strict=strict, version=1)
    if strict:
        with pytest.raises(RefusedError) as refused, torch.no_grad(), bridge.capture() as taken:
            CALLS[field](model, data, taken)  # type: ignore[arg-type]
        assert refused.value.field == field
    else:
        with torch.no_grad(), bridge.capture() as taken:
            CALLS[field](model, data, taken)  # type: ignore[arg-type]
            assert not any(m._forward_hooks for m in model.modules()) or field in (
                "input_ids",
                "position_ids",
            )
            run(model, data, taken)  # type: ignore[arg-type]
    stats = bridge.stats()
    assert stats.capture_off_reason.startswith(f"{field}: found")
    assert "Next step:" in stats.capture_off_reason
    assert stats.captures_refused == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert bridge.flush(DEADLINE) and not trainer.samples
    # The next window is sound: the reason is gone.
    deliver(bridge, model, data)
    assert len(trainer.samples) == 2
    assert bridge.stats().capture_off_reason == ""


def test_invalid_ship_call_is_logged_once(
    trainer: FakeTrainer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    with trainer.serve() as server, caplog.at_level(logging.ERROR):
        bridge = connect(server.address, model=model, version=1)
        for width in (5, 6, 7):
            with torch.no_grad(), bridge.capture() as capture:
                wrong_mask(model, batch((width,)), capture)  # type: ignore[arg-type]
        assert bridge.stats().captures_refused == 3
    assert sum("loss_mask" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_lengths", [None, 1.0]),
        ("prompt_lengths", torch.tensor(1.0)),
        ("prompt_lengths", [[1], [2]]),
        ("rollout_versions", torch.tensor(1)),
        ("rollout_versions", [0, -1]),
        ("rollout_versions", [0.5, 1]),
        ("rollout_versions", -1),
        ("sample_ids", ["a"]),
    ],
)
def test_invalid_per_sequence_numbers_cost_window(
    trainer: FakeTrainer, connect: Connect, field: str, value: object
) -> None:
    model, data = make_model(), batch((8, 6))
    bridge = connect(model=model, version=1)
    with torch.no_grad(), bridge.capture() as capture:
        run(model, data, capture, **{field: value})  # type: ignore[arg-type]
    assert bridge.flush(DEADLINE) and not trainer.samples
    assert bridge.stats().capture_off_reason.startswith(f"{field}: found")
    deliver(bridge, model, data)
    assert len(trainer.samples) == 2


@pytest.mark.parametrize("strict", [False, True])
def test_version_going_backwards_turns_capture_off(
    trainer: FakeTrainer, connect: Connect, strict: bool
) -> None:
    model, data = make_model(), batch((8,))
    bridge = connect(model=model, strict=strict, version=5)
    if strict:
        with pytest.raises(RefusedError, match=r"policy_version: found 4, expected > 5"):
            bridge.sync(4).__enter__()
        return
    with bridge.sync(4) as window:
        pass
    assert window.result is not None
    assert "policy_version: found 4, expected > 5" in bridge.stats().capture_off_reason
    ship(bridge, model, data)
    assert isinstance(bridge.capture(), NullCapture)
    sync(bridge, 6)
    deliver(bridge, model, data)
    assert {s.policy_version for s in trainer.samples.values()} == {6}
    assert bridge.stats().capture_off_reason == ""


@pytest.mark.parametrize(
    ("layers", "vocab", "field"),
    [
        ((2, 4, 9), [1, 2], "aux_layers"),
        ((2,), [1, 64], "draft_vocab_ids"),
        ((2,), [2, 1], "draft_vocab_ids"),
        ((2,), [], "draft_vocab_ids"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_draft_not_fitting_policy_turns_capture_off(
    connect: Connect, layers: tuple[int, ...], vocab: list[int], field: str, strict: bool
) -> None:
    trainer = FakeTrainer(layers=layers, vocab_ids=torch.tensor(vocab))
    with trainer.serve() as server:
        bridge = connect(server.address, wait=False, strict=strict)
        trainer.wait_for(lambda: trainer.sessions >= 2)
        if strict:
            with pytest.raises(RefusedError) as refused:
                bridge.sync(1).__enter__()
            assert refused.value.field == field
            return
        sync(bridge, 1)
        assert isinstance(bridge.capture(), NullCapture)
        assert bridge.stats().capture_off_reason.startswith(f"{field}: found")


def test_run_refused_by_trainer_turns_capture_off(
    trainer: FakeTrainer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = make_model(), batch((8,))
    trainer.refuse_run = RefusedError("policy.hidden_size", 32, 64, "use the right draft")
    bridge = connect(model=model, wait=False)
    trainer.wait_for(lambda: trainer.events.count(("OpenRun", -1)) >= 3)
    sync(bridge, 1)
    ship(bridge, model, data)
    assert "policy.hidden_size: found 32, expected 64" in bridge.stats().capture_off_reason
    told = "draft trainer: policy.hidden_size"
    assert sum(record.message.startswith(told) for record in caplog.records) == 1
    trainer.refuse_run = None
    assert bridge.wait_connected(DEADLINE)
    sync(bridge, 2)
    deliver(bridge, model, data)
    assert len(trainer.samples) == 1
    assert bridge.stats().capture_off_reason == ""


def test_all_samples_refused_stops_capture_until_next_version(
    trainer: FakeTrainer, connect: Connect
) -> None:
    """States that are not finite, for one: found where they are read, in the trainer."""
    model, data = make_model(), batch((8,) * 8)
    bad = [RefusedError("aux_hidden_states", "not finite", "finite", "look at the policy")]
    trainer.refuse = lambda _: bad[0] if bad else None
    bridge = connect(model=model, version=1)
    for _ in range(3):
        deliver(bridge, model, data)
    stats = bridge.stats()
    assert (stats.refused, stats.captures, stats.captures_skipped) == (16, 2, 1)
    assert "samples.aux_hidden_states: found 16 samples" in stats.capture_off_reason
    bad.clear()
    sync(bridge, 2)
    deliver(bridge, model, data)
    assert bridge.stats().accepted == 8
    assert bridge.stats().capture_off_reason == ""


def test_refused_by_field_keeps_bounded_number_of_fields() -> None:
    counters = Counters()
    first = [counters.refused(f"field-{number}") for number in range(1000)]
    stats = counters.snapshot()
    assert stats.refused == sum(stats.refused_by_field.values()) == 1000
    assert len(stats.refused_by_field) == sum(first) == 65
    assert stats.refused_by_field["other"] == 1000 - 64


def test_policy_without_lm_head_is_still_synced() -> None:
    config = BridgeConfig(trainer="127.0.0.1:1", run_id="r", modules=ModulePaths(lm_head="nothing"))
    model, data = make_model(), batch((6,))
    with PolicyBridge(model, config) as bridge:
        with bridge.sync(1) as window:
            pass
        assert window.result is not None and bridge.policy_version == 1
        ship(bridge, model, data)
        stats = bridge.stats()
        assert stats.capture_off_reason.startswith("modules.lm_head: found nothing")
        assert (stats.captures, stats.captures_skipped, stats.syncs) == (0, 1, 1)
        assert not bridge.wait_connected(0.0)


@pytest.mark.parametrize("strict", [False, True])
def test_invalid_window_arguments_turn_capture_off(
    trainer: FakeTrainer, connect: Connect, strict: bool
) -> None:
    bridge = connect(strict=strict)

    def refusal(**arguments: Any) -> str:
        if strict:
            with pytest.raises(RefusedError) as refused:
                bridge.capture(**arguments)
            return str(refused.value)
        assert isinstance(bridge.capture(**arguments), NullCapture)
        return bridge.stats().capture_off_reason

    assert "policy version" in refusal().replace("_", " ")
    sync(bridge, 1)
    for arguments, field in (
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"forwards": 0}, "forw"),
    ):
        assert refusal(**arguments).startswith(field)


@pytest.mark.parametrize("temperature", ["0.5", torch.tensor([0.5])])
def test_temperature_accepts_string_or_tensor(
    trainer: FakeTrainer, connect: Connect, temperature: Any
) -> None:
    model, data = make_model(), batch((8,))
    bridge = connect(model=model, version=1)
    with torch.no_grad(), bridge.capture(temperature=temperature) as capture:
        model(data["input_ids"], attention_mask=data["attention_mask"])
        capture.ship(**data)
    assert bridge.flush(DEADLINE)
    (sample,) = trainer.samples.values()
    assert sample.temperature == 0.5


def test_bridge_misuse_raises_strict_or_not(trainer: FakeTrainer, connect: Connect) -> None:
    bridge = connect()
    with pytest.raises(RefusedError, match="whole number"):
        bridge.sync(-1).__enter__()
    with bridge.sync(1), pytest.raises(RefusedError, match="open window"):
        bridge.sync(2).__enter__()
    bridge.close()
    for call in (bridge.capture, bridge.sync(2).__enter__):
        with pytest.raises(RefusedError, match="closed"):
            call()


def test_logit_check_runs_in_first_window_with_logprobs(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model, data = make_model(), batch((8,))
    bridge = connect(model=model, version=1, modules=ModulePaths(final_norm="model.norm"))
    for given in ({}, {"sampled_logprobs": torch.full((1, 8), -50.0)}):
        with torch.no_grad(), bridge.capture() as capture:
            model.model(data["input_ids"])
            capture.ship(**data, **given)
        assert bridge.flush(DEADLINE)
    assert bridge.stats().capture_off_reason.startswith("model.logits: found sampled_logprobs")
    assert len(trainer.samples) == 1


def test_hung_trainer_costs_one_sync_its_deadline(trainer: FakeTrainer, connect: Connect) -> None:
    trainer.hang.add("PrepareSync")
    bridge = connect(sync_seconds=5.0)
    asked = [0]
    bridge._probe._trainer = Hanging(asked)  # type: ignore[assignment]
    for version in (1, 2, 3):
        sync(bridge, version)
    # The call may come after its deadline, too.
    trainer.wait_for(lambda: ("PrepareSync", -1) in trainer.events)
    assert trainer.events.count(("PrepareSync", -1)) == 1
    assert "is not reached" in str(bridge.stats().last_sync)
    trainer.hang.clear()
    trainer.release.set()
    Hanging.answered = True
    sync(bridge, 4)
    trainer.wait_for(lambda: trainer.events.count(("PrepareSync", -1)) == 2)


class Hanging:
    """A trainer whose GetStatus is answered when it is told to."""

    answered = False

    def __init__(self, asked: list[int]) -> None:
        self.asked = asked

    @property
    def GetStatus(self) -> Hanging:  # noqa: N802
        return self

    def future(self, request: object, timeout: float) -> Hanging:
        self.asked[0] += 1
        return self

    def done(self) -> bool:
        return self.answered

    def code(self) -> None:
        return None

    def cancel(self) -> None:
        pass
