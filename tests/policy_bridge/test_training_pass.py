"""The training forward as the place of capture: versions, logits, and what is no pass of it."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from policy_bridge.copier import Copier
from policy_bridge.extraction import picked_logits
from slipstream.errors import RefusedError
from slipstream.sampling import LogitForm
from tests.tiny import tiny_qwen3

from .conftest import Connect, batch, make_model
from .doubles import DEADLINE, FakeTrainer
from .windows import Windows, hold, logits_of, loss_of


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
