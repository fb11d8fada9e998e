"""Device memory is bounded, running out of it costs samples, and nothing is read too late.

Streams are emulated: a ``Copier`` for CUDA does its work in a thread, on tensors of the CPU.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policy_bridge import BridgeConfig, ModulePaths, extraction, hooks
from policy_bridge.capture import Capture
from policy_bridge.copier import Copier
from policy_bridge.outbox import file_bytes
from policy_bridge.selection import Spent, bytes_per_token
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.shm import SharedFile
from tests.gpu.shortages import SHORTAGES, shortage
from tests.tiny import tiny_qwen3
from tests.waiting import until

from .conftest import Connect, batch, deliver, make_model
from .doubles import DEADLINE, FakeTrainer
from .windows import LAYERS, Batch, Streams, Windows, hold, own_logprobs

HIDDEN = 16
TOKEN = bytes_per_token(len(LAYERS), HIDDEN, torch.float32)
ROW = 10
STATES = ROW * (len(LAYERS) + 1) * HIDDEN * 4
"""Bytes of a row's states where they are."""


@pytest.fixture(params=["host", "device"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    made = Copier() if request.param == "host" else Streams(monkeypatch).copier()
    yield made
    made.close()


def run(
    capture: Capture, model: torch.nn.Module, data: Batch, rows: int = 3, wait: bool = True
) -> None:
    """Ship a batch in micro-batches, each after the work on the one before."""
    for start in range(0, len(data["input_ids"]), rows):
        micro = {key: value[start : start + rows] for key, value in data.items()}
        with torch.no_grad():
            model(micro["input_ids"], attention_mask=micro["attention_mask"])
        capture.ship(**micro)
        if wait:
            assert capture.copier.wait_idle(DEADLINE)


@pytest.mark.parametrize("most", [3, 4])
def test_thinned_passes_choose_same_samples_as_whole_passes(copier: Copier, most: int) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 12)
    found = []
    for device_bytes in (1 << 30, 2 * most * STATES):
        windows = Windows(model, budget_bytes=4 * ROW * TOKEN)
        draw = random.Random(7).random
        with windows.open(copier=copier, device_bytes=device_bytes, draw=draw) as capture:
            run(capture, model, data)
        assert copier.wait_idle(DEADLINE)
        found.append({tuple(s.token_ids.tolist()): s for s in windows.samples})
        stats = windows.counters.snapshot()
        assert stats.captured_tokens == 12 * ROW
        chosen = 4 if device_bytes == 1 << 30 else min(most, 4)
        assert (stats.chosen_samples, stats.not_chosen_samples) == (chosen, 12 - chosen)
    whole, thinned = found
    assert len(whole) == 4 and set(thinned) <= set(whole)
    assert len(thinned) == min(most, 4)
    for tokens, sample in thinned.items():
        assert torch.equal(sample.block, whole[tokens].block)
        own = whole[tokens].header
        own.sample_id = sample.header.sample_id
        assert sample.header == own


def test_window_of_many_passes_holds_at_most_device_bytes(copier: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 24)
    windows, alive = Windows(model, budget_bytes=2 * ROW * TOKEN), []
    kept: list[weakref.ref[torch.Tensor]] = []

    def keep(_: object, args: tuple[torch.Tensor, ...]) -> None:
        kept.append(weakref.ref(args[0].untyped_storage()))

    hook = model.lm_head.register_forward_pre_hook(keep)
    with windows.open(copier=copier, device_bytes=2 * 6 * STATES) as capture:
        for start in range(0, 24, 3):
            run(capture, model, {key: value[start : start + 3] for key, value in data.items()})
            gc.collect()
            alive.append(sum(ref() is not None for ref in kept))
            assert capture._kept_bytes + sum(r.nbytes for r in capture._records) <= 12 * STATES
    hook.remove()
    assert copier.wait_idle(DEADLINE)
    # Without a bound all of them: 1, 2, 3, ... 8 passes.
    assert max(alive) <= 2
    assert len(windows.samples) == 2
    assert capture._kept == {}


@pytest.mark.parametrize("end", ["exception", "refusal"])
def test_window_that_ends_early_frees_kept_states(copier: Copier, end: str) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 6)
    windows = Windows(model)
    with suppress(KeyError), windows.open(copier=copier, device_bytes=2 * STATES) as capture:
        run(capture, model, data, rows=1)
        if end == "exception":
            raise KeyError("the loop's own")
        with torch.no_grad():
            model(data["input_ids"])
        with pytest.raises(RefusedError, match="input_ids"):
            capture.ship(data["input_ids"][:1], loss_mask=data["loss_mask"])
        assert capture._kept == {} and capture._records == []
    assert copier.wait_idle(DEADLINE)
    assert windows.samples == [] and capture._kept == {} and capture._records == []


def test_window_exception_during_thinning_leaves_thread_alive(
    side: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 4)
    windows, nbytes = Windows(model), extraction.Record.nbytes.fget  # type: ignore[attr-defined]
    with windows.open(copier=side, device_bytes=4 * STATES) as capture:

        def counted(record: extraction.Record) -> int:
            if threading.current_thread().name == "slipstream-copies":
                capture._drop_held()
            return nbytes(record)  # type: ignore[no-any-return]

        monkeypatch.setattr(extraction.Record, "nbytes", property(counted))
        run(capture, model, data, rows=4)
    assert side.wait_idle(DEADLINE)
    assert not side.died and capture._kept == {}


def test_choice_that_nobody_makes_frees_kept_states(side: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 2)
    windows = Windows(model)
    with windows.open(copier=side, device_bytes=2 * STATES) as capture:
        run(capture, model, data, rows=2)
        assert len(capture._kept) == 1
        side.close()
    assert windows.counters.snapshot().shed == {"copies_behind": 1}
    assert capture._kept == {}


def test_passes_beyond_device_bytes_are_shed_while_copies_lag(side: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 4)
    windows = Windows(model)
    go_on = hold(side)
    with windows.open(copier=side, device_bytes=4 * STATES, forwards=4) as capture:
        run(capture, model, data, rows=2, wait=False)
        assert windows.counters.snapshot().shed == {}
        run(capture, model, data, rows=2, wait=False)
        assert windows.counters.snapshot().shed == {"device_full": 4}
    go_on.set()
    assert side.wait_idle(DEADLINE)
    assert side.nbytes == 0
    assert len(windows.samples) >= 2


@pytest.mark.parametrize("windows_of", [1, 8])
@pytest.mark.parametrize("known", [False, True])
def test_host_ahead_of_its_device_sheds_nothing(side: Copier, known: bool, windows_of: int) -> None:
    """Eight passes are queued before the device has made the first; their states fit."""
    model, data = tiny_qwen3().eval(), batch((ROW,) * 2)
    windows = Windows(model)
    go_on = hold(side)
    for _ in range(8 // windows_of):
        forwards = windows_of if known else None
        with windows.open(copier=side, device_bytes=32 * STATES, forwards=forwards) as capture:
            for _ in range(windows_of):
                run(capture, model, data, wait=False)
    assert side.nbytes == 16 * STATES and windows.samples == []
    go_on.set()
    assert side.wait_idle(DEADLINE)
    assert windows.counters.snapshot().shed == {} and side.nbytes == 0
    assert len(windows.samples) == 16


def test_states_kept_by_a_window_count_until_it_has_chosen(side: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 4)
    windows = Windows(model)
    with windows.open(copier=side, device_bytes=4 * STATES) as before:
        run(before, model, data, rows=4)
        assert before._kept_bytes == 2 * STATES
        go_on = hold(side)
    with windows.open(copier=side, device_bytes=4 * STATES) as after:
        run(after, model, data, rows=1, wait=False)
        assert before._kept_bytes + sum(r.nbytes for r in after._records) == 4 * STATES
    assert windows.counters.snapshot().shed == {"device_full": 2}
    go_on.set()
    assert side.wait_idle(DEADLINE)
    assert len(windows.samples) == 4 and side.nbytes == 0


def test_late_choice_spends_remaining_budget(side: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 2)
    windows, spent = Windows(model, budget_bytes=3 * ROW * TOKEN), Spent()
    go_on = hold(side)
    for _ in range(2):
        # The second is opened before the first has chosen.
        with windows.open(copier=side, spent=spent) as capture:
            run(capture, model, data, rows=2, wait=False)
    assert spent.samples == 0
    go_on.set()
    assert side.wait_idle(DEADLINE)
    assert (spent.samples, spent.nbytes) == (3, 3 * ROW * TOKEN)
    assert windows.counters.snapshot().chosen_samples == len(windows.samples) == 3


def _short(kind: str) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise shortage(kind)

    return fail


@pytest.mark.parametrize("kind", SHORTAGES)
def test_thinning_out_of_memory_sheds_and_window_goes_on(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 4)
    windows = Windows(model)
    with windows.open(copier=copier, device_bytes=2 * STATES) as capture:
        with monkeypatch.context() as full:
            full.setattr(extraction.Record, "part", _short(kind))
            run(capture, model, data, rows=2)
        assert windows.counters.snapshot().shed == {"device_memory": 4}
        run(capture, model, data, rows=2)
    assert copier.wait_idle(DEADLINE)
    assert len(windows.samples) == 1


@pytest.mark.parametrize(
    ("place", "kind"),
    [("without_logits", "allocator"), ("without_logits", "handle"), ("fill", "page-locked")],
)
def test_out_of_device_memory_costs_window_not_run(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch, place: str, kind: str
) -> None:
    """Passes that were shipped before are counted too."""
    model, data = make_model(), batch((9, 12))
    bridge = connect(model=model, strict=True, version=1)
    with monkeypatch.context() as full:
        with torch.no_grad(), bridge.capture() as capture:
            for _ in range(2):
                model(data["input_ids"])
                capture.ship(**data)
                full.setattr(f"policy_bridge.capture.{place}", _short(kind))
        assert bridge.flush(DEADLINE)
    assert bridge.stats().shed == {"device_memory": 4}
    deliver(bridge, model, data)
    assert bridge.stats().accepted == 2


@pytest.mark.parametrize("error", ["memory", "refusal"])
def test_copy_failure_counts_each_sample_once(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """Four samples in four groups: one is offered, one is not taken, two come to nothing."""
    model, data = tiny_qwen3().eval(), batch((ROW,) * 4)
    windows, filled = Windows(model), []
    taken = iter((True, False, True, True))

    def fill(sample: Sample, chosen: extraction.Chosen) -> None:
        filled.append(sample)
        if len(filled) == 2:
            if error == "memory":
                raise shortage("page-locked")
            raise RefusedError("hidden_states", "written in place", "none", "seeded by a test")
        extraction.fill(sample, chosen)

    def takes(nbytes: int, priority: int) -> bool:
        took = next(taken)
        if not took:
            windows.counters.shed("outbox_full", 1, nbytes)
        return took

    monkeypatch.setattr("policy_bridge.capture.fill", fill)
    monkeypatch.setattr("policy_bridge.capture.GROUP_BYTES", 1)
    with windows.open(takes=takes, refuse=lambda refusal: None) as capture:
        run(capture, model, data, rows=4)
    stats, reason = windows.counters.snapshot(), "device_memory"
    if error == "refusal":
        reason = "capture_refused"
    assert len(windows.samples) == 1 and stats.chosen_samples == 4
    assert stats.shed == {"outbox_full": 1, reason: 2}


@pytest.mark.parametrize("kind", SHORTAGES)
def test_out_of_memory_in_hook_does_not_end_forward(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, data = tiny_qwen3().eval(), batch((9, 7))
    windows = Windows(model)
    with windows.open() as capture:
        with monkeypatch.context() as full:
            full.setattr(hooks.ReturnedLogits, "of", _short(kind))
            run(capture, model, data)
        # Compared with the next pass instead.
        assert capture.probe
        run(capture, model, data)
        assert not capture.probe
    assert len(windows.samples) == 4


def test_event_without_memory_costs_pass_not_run(
    side: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = tiny_qwen3().eval(), batch((9, 7))
    windows = Windows(model)
    with windows.open(copier=side, forwards=2) as capture:
        with monkeypatch.context() as full:
            event = SimpleNamespace(record=_short("beside the allocator"))
            full.setattr(torch.cuda, "Event", lambda: event)
            run(capture, model, data)
        assert windows.counters.snapshot().shed == {"copies_behind": 2}
        run(capture, model, data)
    assert side.wait_idle(DEADLINE)
    assert len(windows.samples) == 2


def test_ship_copies_arguments_that_loop_overwrites(copier: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((9, 7))
    given: dict[str, Any] = {
        **data,
        "input_ids": data["input_ids"].int(),
        "position_ids": torch.arange(9).repeat(2, 1),
        "sampled_logprobs": -torch.rand(2, 9),
        "sampled_logits": torch.rand(2, 9),
        "prompt_lengths": torch.tensor([2, 2]),
        "rollout_versions": [5, 6],
    }
    found = []
    for overwritten in (False, True):
        windows, own = Windows(model), deepcopy(given)
        go_on = hold(copier)
        with torch.no_grad(), windows.open(copier=copier, probe=False) as capture:
            model(own["input_ids"], attention_mask=own["attention_mask"])
            capture.ship(**own)
            for value in own.values() if overwritten else ():
                value.__setitem__(slice(None), [0, 0] if isinstance(value, list) else 0)
        go_on.set()
        assert copier.wait_idle(DEADLINE)
        found.append({tuple(s.token_ids.tolist()): s for s in windows.samples})
    whole, late = found
    assert whole.keys() == late.keys() and len(whole) == 2
    for tokens, sample in whole.items():
        assert torch.equal(sample.block, late[tokens].block)
        assert sample.header.prompt == late[tokens].header.prompt
        assert sample.header.rollout_policy_version == late[tokens].header.rollout_policy_version


@pytest.mark.parametrize("moved", [False, True])
def test_logprobs_computed_for_chosen_rows_of_unmoved_weights(
    side: Copier, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    model, data = tiny_qwen3().eval(), batch((9,) * 8)
    windows = Windows(model, budget_bytes=2 * 9 * TOKEN)
    rows: list[int] = []
    with torch.no_grad():
        expected = own_logprobs(model(data["input_ids"]).logits, data["input_ids"])
    go_on = hold(side)
    with torch.no_grad(), windows.open(copier=side, probe=False) as capture:
        model(data["input_ids"])
        monkeypatch.setattr(extraction, "whole_logits", _counting(rows))
        capture.ship(data["input_ids"], loss_mask=data["loss_mask"])
        assert rows == []
    if moved:
        with torch.no_grad():
            model.lm_head.weight.mul_(2.0)
    go_on.set()
    assert side.wait_idle(DEADLINE)
    assert sum(rows) == 2 * 8
    if moved:
        assert windows.samples == []
        assert windows.counters.snapshot().shed == {"policy_moved": 2}
        return
    for sample in windows.samples:
        row = data["input_ids"].tolist().index(sample.token_ids.tolist())
        torch.testing.assert_close(sample.sampled_logprobs[1:], expected[row])
    assert len(windows.samples) == 2


def _counting(rows: list[int]) -> object:
    whole = extraction.whole_logits

    def made(*arguments: object) -> object:
        logits_of = whole(*arguments)  # type: ignore[arg-type]

        def call(final: torch.Tensor) -> torch.Tensor:
            rows.append(len(final))
            return logits_of(final)

        return call

    return made


def offloaded(model: torch.nn.Module) -> None:
    """lm_head's weight on another device than the pass."""
    weight = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)


def test_offloaded_lm_head_logprobs_come_from_pass_logits(copier: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((9, 7))
    found = []
    for gone in (False, True):
        windows = Windows(model)
        with torch.no_grad(), windows.open(copier=copier) as capture:
            model(data["input_ids"], attention_mask=data["attention_mask"])
            if gone:
                offloaded(model)
            capture.ship(**data)
        assert copier.wait_idle(DEADLINE)
        found.append([windows.of_row(data, row) for row in range(2)])
    for own, late in zip(*found, strict=True):
        assert torch.equal(own.final_hidden, late.final_hidden)
        torch.testing.assert_close(own.sampled_logprobs, late.sampled_logprobs)
        torch.testing.assert_close(own.sampled_logits, late.sampled_logits)


@pytest.mark.parametrize("when", ["before ship", "before the choice"])
def test_offloaded_lm_head_needed_later_costs_window(
    trainer: FakeTrainer, connect: Connect, when: str
) -> None:
    model, data = make_model(), batch((9, 7))
    paths = ModulePaths(final_norm="model.norm")
    bridge = connect(model=model, version=1, modules=paths)
    weight = model.lm_head.weight
    with torch.no_grad(), bridge.capture() as capture:
        model(data["input_ids"])
        if when == "before ship":
            offloaded(model)
        capture.ship(**data)
        offloaded(model)
    stats = bridge.stats()
    assert stats.capture_off_reason.startswith("lm_head.weight: found on meta, expected on cpu")
    assert (stats.captures_refused, stats.chosen_samples) == (1, 2 if "choice" in when else 0)
    model.lm_head.weight = weight
    deliver(bridge, model, data)
    assert bridge.stats().accepted == 2


def test_states_are_copied_on_their_own_device(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data, streams = make_model(), batch((9, 7)), Streams(monkeypatch)
    bridge = connect(model=model, version=1)
    assert not bridge._copier_for(torch.device("cpu"))[0].deferred
    made, _ = bridge._copier_for(torch.device("cuda"))
    assert made.deferred and bridge._copier is made
    # Another GPU has streams of its own.
    assert bridge._copier_for(torch.device("cuda", 1))[0] is not made
    asked: list[torch.device] = []
    side = streams.copier()
    most = 9 * bytes_per_token(len(LAYERS), model.config.hidden_size, torch.float32)

    def copier_for(device: torch.device) -> tuple[Copier, int]:
        asked.append(device)
        return side, most

    windows = Windows(model)
    with windows.open(copier_for=copier_for) as capture:
        assert asked == [] and capture.copier is not side
        run(capture, model, data, rows=1)
        assert capture.copier is side
    assert side.wait_idle(DEADLINE)
    side.close()
    assert asked == [torch.device("cpu")]
    # Of two rows the one that is within the device's bound.
    assert len(windows.samples) == 1 and ("synchronize", False) in streams.noted


def test_unset_bounds_follow_the_device_of_the_first_states(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration and the window are made before the policy is on a GPU."""
    create, files = SharedFile.create, list[int]()

    def noted(directory: Path, nbytes: int) -> SharedFile:
        files.append(nbytes)
        return create(directory, nbytes)

    Streams(monkeypatch)
    monkeypatch.setattr(SharedFile, "create", noted)
    model, data = make_model(), batch((9, 7))
    bridge = connect(model=model, version=1)
    assert bridge.stats().outbox_capacity_bytes == 256 << 20

    def on_a_gpu(_: torch.device) -> tuple[Copier, int]:
        copier, most = bridge._copier_for(torch.device("cuda"))
        copier.pinned = False
        return copier, most

    with torch.no_grad(), bridge.capture() as capture:
        assert isinstance(capture, Capture)
        capture.copier_for = on_a_gpu
        model(data["input_ids"])
        capture.ship(**data)
        assert capture.budget_bytes == 1 << 30
    assert bridge.flush(DEADLINE)
    until(lambda: bridge.stats().connects == 2)
    stats = bridge.stats()
    assert stats.accepted + stats.duplicate == 2 and stats.shed == {}
    assert (stats.outbox_capacity_bytes, stats.last_error) == (2 << 30, "")
    assert files == [file_bytes(256 << 20), file_bytes(2 << 30)]
    # What was set stays.
    given = BridgeConfig("h:1", "run", bytes_per_step=5, outbox_bytes=7)
    assert given.bounds("cuda") == given.bounds("cpu") == (5, 7)


def test_refusal_after_window_frees_kept_states(side: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((ROW,) * 3)
    windows, refusals = Windows(model), list[RefusedError]()
    with windows.open(copier=side, device_bytes=2 * STATES, refuse=refusals.append) as capture:
        run(capture, model, {key: value[:2] for key, value in data.items()})
        assert len(capture._kept) == 1
        go_on = hold(side)
        last = {key: value[2:] for key, value in data.items()}
        with torch.no_grad():
            model(last["input_ids"])
        labels = last["input_ids"].masked_fill(~last["loss_mask"], -100)
        capture.ship(**{**last, "input_ids": labels})
    go_on.set()
    assert side.wait_idle(DEADLINE)
    assert [error.field for error in refusals] == ["input_ids"]
    assert capture._kept == {} and windows.samples == []
    assert windows.counters.snapshot().shed == {"capture_refused": 1}


def test_window_is_freed_without_garbage_collector(copier: Copier) -> None:
    model, data = tiny_qwen3().eval(), batch((9, 7))
    windows = Windows(model)
    gc.disable()
    try:
        with windows.open(copier=copier) as capture:
            run(capture, model, data)
        assert copier.wait_idle(DEADLINE)
        gone = weakref.ref(capture)
        del capture
        assert gone() is None
    finally:
        gc.enable()
    assert len(windows.samples) == 2
