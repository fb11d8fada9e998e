"""The parts of its training process that a bridge leaves alone."""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from policy_bridge.config import ModulePaths
from policy_bridge.extraction import whole_logits
from policy_bridge.model import find_modules
from slipstream.shm import SharedFile

from .conftest import Connect, batch, deliver, make_model, sync
from .doubles import DEADLINE, FakeTrainer
from .windows import Windows, logits_of

FAILING = """
import sys
from policy_bridge import BridgeConfig, PolicyBridge
from tests.policy_bridge.conftest import batch, make_model, ship, sync

model = make_model()
bridge = PolicyBridge(model, BridgeConfig(trainer=sys.argv[1], run_id="run"))
assert bridge.wait_connected(60)
sync(bridge, int(sys.argv[2]))
for seed in range(3):
    ship(bridge, model, batch((40,) * 20, seed=seed))
raise SystemExit(3)
"""


@pytest.mark.slow
def test_failing_loop_exits_with_its_own_error() -> None:
    """And not by SIGABRT, of a thread that is inside torch while the interpreter ends."""
    with FakeTrainer().serve() as server:
        for version in (1, 2, 3):
            command = [sys.executable, "-c", FAILING, server.address, str(version)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert ended.returncode == 3, ended.stderr[-2000:]


def test_bridge_leaves_random_state_alone(connect: Connect) -> None:
    random.seed(5)
    before = random.getstate(), torch.get_rng_state()
    absent = connect("127.0.0.1:1", wait=False)
    absent.wait_connected(1.0)
    present = connect(version=1)
    deliver(present, make_model(), batch((9,)))
    absent.close()
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_python_without_memfd_create_sends_inline(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv's Python has no memfd_create."""
    monkeypatch.delattr(os, "memfd_create")
    model = make_model()
    bridge = connect(model=model, version=1, transport="grpc", strict=True)
    deliver(bridge, model, batch((9,)))
    assert len(trainer.samples) == 1
    memory = SharedFile.anonymous(1 << 16)
    memory.close()


Around = Callable[[], AbstractContextManager[object]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: torch.device("meta"), lambda: torch.device("meta")),
        (torch.inference_mode, nullcontext),
        (nullcontext, torch.inference_mode),
    ],
    ids=["default-device", "inference-then-not", "not-then-inference"],
)
def test_sync_under_inference_mode_or_default_device(
    first: Around, second: Around, trainer: FakeTrainer, connect: Connect
) -> None:
    model = make_model()
    bridge = connect(model=model, strict=True)
    for version, around in enumerate((first, second, first, second), 1):
        with around():
            sync(bridge, version)
        deliver(bridge, model, batch((9,), seed=version))
        assert bridge.flush(DEADLINE)
    assert sorted(s.header.policy_version for s in trainer.samples.values()) == [1, 2, 3, 4]


@pytest.fixture
def brain_floats() -> Iterator[None]:
    """torch makes bfloat16 tensors where no type is named, as loops of bfloat16 policies ask."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_capture_under_bfloat16_default_dtype(
    brain_floats: None, trainer: FakeTrainer, connect: Connect
) -> None:
    """Nor at a token whose number it cannot hold: the last of 260 is 259."""
    model, data = make_model(), batch((280,))
    data["loss_mask"][:, :20] = 0
    logits = logits_of(model, data).float().log_softmax(-1)
    logprobs = torch.zeros(1, 280, dtype=torch.float32)
    logprobs[:, 1:] = logits[:, :-1].gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    bridge = connect(version=1, model=model, modules=ModulePaths(final_norm="model.norm"))
    with torch.no_grad(), bridge.capture(temperature=1.0) as capture:
        model.model(input_ids=data["input_ids"], attention_mask=data["attention_mask"])
        capture.ship(**data, sampled_logprobs=logprobs)
    assert bridge.flush(DEADLINE)
    (sample,) = trainer.samples.values()
    assert torch.equal(sample.sampled_logprobs[20:], logprobs[0, 20:])


def pickled(model: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_policy_copy_made_inside_window_is_not_captured(
    copied: Callable[[torch.nn.Module], torch.nn.Module],
) -> None:
    """Its passes are not the policy's."""
    data, model = batch((9, 5)), make_model()
    windows = Windows(model)
    with torch.no_grad(), windows.open() as capture:
        other = copied(model)
        other.requires_grad_(False).model.embed_tokens.weight.add_(0.1)
        logits_of(model, data)
        logits_of(other, data)
        capture.ship(**data)
    expected = model.model(data["input_ids"], attention_mask=data["attention_mask"])[0]
    for row, length in enumerate((9, 5)):
        found = windows.of_row(data, row).final_hidden
        torch.testing.assert_close(found, expected[row, :length])


def test_logits_computed_outside_ambient_autocast() -> None:
    modules = find_modules(make_model(), ModulePaths())
    states = torch.randn(3, modules.hidden_size)
    plain = whole_logits(modules, torch.float32)(states)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whole_logits(modules, torch.float32)(states), plain)
