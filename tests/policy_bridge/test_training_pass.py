"""The training forward as the place of capture: gradients, versions, and what is no pass of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from policy_bridge import PolicyBridge
from policy_bridge.copier import Copier
from policy_bridge.extraction import picked_logits
from slipstream.errors import RefusedError
from slipstream.sampling import LogitForm
from tests.tiny import tiny_qwen3

from .conftest import Connect, batch, make_model
from .doubles import DEADLINE, FakeTrainer
from .test_models import PLAIN, checkpointed, compiled_layers_in_place, plain
from .windows import Batch, Windows, assert_same_bits, hold, hooks_on, logits_of, own_logprobs


def only_ids(model: nn.Module, micro: Batch) -> torch.Tensor:
    return model(micro["input_ids"])


def packed(data: Batch) -> Batch:
    """The rows of a batch one after the other in one row."""
    kept = data["attention_mask"].bool()
    lengths = kept.sum(1).tolist()
    return {
        "input_ids": data["input_ids"][kept][None],
        "loss_mask": data["loss_mask"][kept][None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }


def loss_of(logits: torch.Tensor, micro: Batch) -> torch.Tensor:
    return (own_logprobs(logits, micro["input_ids"]) * micro["loss_mask"][:, 1:]).sum()


def accumulate(
    model: nn.Module,
    data: Batch,
    windows: Windows | None,
    forward: Callable[[nn.Module, Batch], torch.Tensor] = logits_of,
) -> list[torch.Tensor]:
    """Gradients of two micro-batches, each followed by a look at the policy without gradients.

    Every pass is shipped after its backward, and no log-probs are given.
    """
    model.train()
    model.zero_grad(set_to_none=True)
    capture = windows.open() if windows is not None else PolicyBridge.disabled().capture()
    with capture:
        for rows in (slice(0, 2), slice(2, 3)):
            micro = {key: value[rows] for key, value in data.items()}
            loss_of(forward(model, micro), micro).backward()
            with torch.no_grad():
                forward(model, {key: value.flip(0) for key, value in micro.items()})
            capture.ship(**micro)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [tiny_qwen3, checkpointed(False), checkpointed(True)])
def test_training_pass_gradients_bit_identical(
    make: Callable[[], PreTrainedModel],
) -> None:
    model, data = make(), batch((9, 5, 12))
    expected = accumulate(model, data, None)
    before = hooks_on(model)
    windows, log_probs = Windows(model, training=True), Windows(model)
    assert_same_bits(expected, accumulate(model, data, windows))
    assert hooks_on(model) == before
    with log_probs.open() as capture, torch.no_grad():
        for rows in (slice(0, 2), slice(2, 3)):
            micro = {key: value[rows] for key, value in data.items()}
            logits_of(model, micro)
            capture.ship(**micro)
    assert len(windows.samples) == 3 == len(log_probs.samples)
    for row in range(3):
        assert torch.equal(windows.of_row(data, row).block, log_probs.of_row(data, row).block)


@pytest.mark.parametrize("make", [plain, compiled_layers_in_place])
def test_training_pass_captures_compiled_layers(make: Callable[[], nn.Module]) -> None:
    model, data = make(), batch((9, 5, 12))
    expected = accumulate(model, data, None, only_ids)
    windows = Windows(model, paths=PLAIN, training=True)
    assert_same_bits(expected, accumulate(model, data, windows, only_ids))
    assert len(windows.samples) == 3


def test_training_pass_captures_packed_rows() -> None:
    model, data = tiny_qwen3(), batch((9, 5, 12))
    row = packed(data)

    def step(windows: Windows | None) -> list[torch.Tensor]:
        model.train()
        model.zero_grad(set_to_none=True)
        capture = windows.open() if windows is not None else PolicyBridge.disabled().capture()
        with capture:
            inputs = {key: row[key] for key in ("input_ids", "position_ids")}
            loss_of(model(**inputs, use_cache=False).logits, row).backward()
            capture.ship(**row)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    windows = Windows(model, training=True)
    assert_same_bits(step(None), step(windows))
    assert [len(sample.token_ids) for sample in windows.samples].count(9) == 1
    for number in range(3):
        windows.of_row(data, number)


def test_training_window_refuses_pass_without_gradients() -> None:
    model, data = tiny_qwen3(), batch((9, 7))
    windows = Windows(model, training=True)
    with torch.no_grad(), windows.open() as capture:
        logits_of(model, data)
        with pytest.raises(RefusedError, match="no_grad"):
            capture.ship(**data)


def test_ship_before_backward_frees_logits() -> None:
    model, data = tiny_qwen3(), batch((9, 7))
    windows = Windows(model, training=True)
    with windows.open() as capture:
        logits = logits_of(model, data)
        loss, held = loss_of(logits, data), StorageWeakRef(logits.untyped_storage())
        del logits
        assert not held.expired()
        capture.ship(**data)
        assert held.expired()
        loss.backward()
    assert len(windows.samples) == 2


def test_logits_overwritten_by_backward_kernel_are_kept() -> None:
    model, data = tiny_qwen3(), batch((9, 7))
    windows = Windows(model, training=True)
    with windows.open() as capture:
        logits = logits_of(model, data)
        own = picked_logits(logits.detach(), data["input_ids"], LogitForm())
        loss_of(logits, data).backward()
        logits.data.zero_()  # as a kernel does: no version counter tells
        capture.ship(**data, sampled_logprobs=own - 9.0)
    for row, length in enumerate((9, 7)):
        sample = windows.of_row(data, row)
        assert torch.equal(sample.sampled_logits[1:], own[row, 1:length])


def test_second_optimizer_step_of_version_sheds_samples(
    trainer: FakeTrainer, connect: Connect
) -> None:
    """Two optimizer steps in one version: what is of the first is sent, what is of none is shed."""
    model, data = make_model(), batch((9, 5, 12, 7))
    with torch.no_grad():
        logits = [model(data["input_ids"][n : n + 1]).logits[0, :-1] for n in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    bridge = connect(model=model, version=1)
    for first in (0, 2):
        with bridge.capture(training=True) as capture:
            for row in range(first, first + 2):
                micro = {key: value[row : row + 1] for key, value in data.items()}
                loss_of(logits_of(model, micro), micro).backward()
                capture.ship(**micro)
        optimizer.step()
    assert bridge.flush(DEADLINE)
    assert bridge.stats().shed == {"policy_moved": 2}
    assert len(trainer.samples) == 2
    for sample in trainer.samples.values():
        length = len(sample.token_ids)
        row = (9, 5).index(length)
        own = logits[row][: length - 1].log_softmax(-1)
        own = own.gather(-1, sample.token_ids[1:, None].long()).squeeze(-1)
        found = trainer.tensor(sample, "sampled_logprobs")[1:]
        kept = sample.loss_mask[1:]
        torch.testing.assert_close(found[kept], own[kept], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 3, 1000])
def test_logprobs_on_device_survive_immediate_step(
    side: Copier, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    from policy_bridge import extraction

    model, data = tiny_qwen3(), batch((9, 7))
    monkeypatch.setattr(extraction, "_BLOCK_BYTES", columns * 4 * model.config.vocab_size)
    windows = Windows(model, training=True)
    go_on = hold(side)
    with windows.open(copier=side) as capture:
        logits = logits_of(model, data)
        loss_of(logits, data).backward()
        capture.ship(**data)
    torch.optim.AdamW(model.parameters(), 0.1).step()
    go_on.set()
    assert side.wait_idle(DEADLINE)
    assert len(windows.samples) == 2
    for row, length in enumerate((9, 7)):
        sample = windows.of_row(data, row)
        own = logits[row, : length - 1].detach().log_softmax(-1)
        own = own.gather(-1, data["input_ids"][row, 1:length, None]).squeeze(-1)
        kept = sample.loss_mask[1:]
        torch.testing.assert_close(sample.sampled_logprobs[1:][kept], own[kept])
