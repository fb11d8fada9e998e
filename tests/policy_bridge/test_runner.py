"""The threads of choice and copies, what is waited for, and what becomes of what waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from policy_bridge import capture
from policy_bridge.copier import JOBS, Copier
from policy_bridge.extraction import gather_into
from slipstream.errors import RefusedError

from .conftest import Connect, batch, deliver, make_model, ship
from .doubles import DEADLINE, FakeTrainer
from .windows import Streams, hold, own_logprobs


@pytest.fixture
def side() -> Iterator[Copier]:
    side = Copier(torch.device("cpu"))
    yield side
    side.close()


def test_copier_error_is_raised_once_by_next_put(side: Copier) -> None:
    def job() -> None:
        raise RefusedError("states", "late", "early", "hurry")

    assert side.put(job)
    assert side.wait_idle(DEADLINE)
    with pytest.raises(RefusedError, match="hurry"):
        side.put(lambda: None)
    assert side.put(lambda: None)


def test_copier_error_does_not_keep_states_alive(side: Copier) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def job() -> None:
        states = torch.zeros(4)
        made.append(weakref.ref(states))
        raise RefusedError("states", "late", "early", "hurry")

    assert side.put(job)
    assert side.wait_idle(DEADLINE)
    assert made[0]() is None
    with pytest.raises(RefusedError, match="hurry"):
        side.put(lambda: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_copier_dead_thread_takes_no_jobs(side: Copier) -> None:
    go_on = hold(side)
    assert side.put(lambda: [][0])
    assert side.put(lambda: None)
    go_on.set()
    assert side._thread is not None
    side._thread.join(DEADLINE)
    assert side.wait_idle(0.0)
    assert not side.put(lambda: None)
    assert side.died


def test_copier_on_host_chooses_at_once_and_copies_in_thread() -> None:
    runner, caller = Copier(torch.device("cpu")), threading.get_ident()
    threads: list[tuple[str, int]] = []

    def choose() -> list[int] | None:
        threads.append(("choose", threading.get_ident()))
        return [1]

    def copy(chosen: list[int]) -> None:
        assert chosen == [1]
        threads.append(("copy", threading.get_ident()))

    assert runner.submit(choose, copy)
    assert runner.wait_idle(DEADLINE)
    assert [what for what, _ in threads] == ["choose", "copy"]
    assert threads[0][1] == caller != threads[1][1]
    assert runner.submit(lambda: None, copy)
    assert runner.wait_idle(DEADLINE)
    assert len(threads) == 2
    # Too much waits: nothing is given up, the caller copies.
    go_on = hold(runner)
    for _ in range(JOBS + 1):
        assert runner.submit(choose, copy)
    assert [thread for what, thread in threads[2:] if what == "copy"] == [caller]
    go_on.set()
    runner.close()
    assert [what for what, _ in threads].count("copy") == JOBS + 2


def test_copier_on_device_never_synchronizes_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    runner = Copier(torch.device("cuda"))

    def choose() -> int:
        streams.note("choose")
        return 1

    def copy(chosen: int) -> None:
        streams.note("copy")

    def fail() -> int:
        raise RefusedError("choice", "late", "early", "hurry")

    assert runner.submit(choose, copy)
    assert runner.wait_idle(DEADLINE)
    assert streams.noted[0] == ("record on policy", True)
    assert streams.noted[1:] == [
        # Its own, before it enters a stream: a thread begins on GPU 0.
        ("set device cuda:1", False),
        ("enter a stream of cuda:1", False),
        ("wait for event", False),
        ("choose", False),
        ("copy", False),
        ("synchronize", False),
    ]
    # Also of a job that failed nothing is let go of before its stream is done.
    assert runner.submit(fail, copy)
    assert runner.wait_idle(DEADLINE)
    assert streams.noted[-1] == ("synchronize", False)
    with pytest.raises(RefusedError, match="hurry"):
        runner.submit(choose, copy)
    # The device is far behind: what waits for it is bounded by who submits it.
    go_on = hold(runner)
    assert [runner.submit(choose, copy) for _ in range(4 * JOBS)] == [True] * 4 * JOBS
    go_on.set()
    runner.close()
    assert sum(what == "copy" for what, _ in streams.noted) == 1 + 4 * JOBS
    # Nothing is taken any more: neither is called.
    assert not runner.submit(choose, copy)
    assert sum(what == "copy" for what, _ in streams.noted) == 1 + 4 * JOBS


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No sample is written before this is set."""
    go_on, whole = threading.Event(), capture.Capture._copy_and_offer

    def late(*args: object) -> None:
        assert go_on.wait(DEADLINE)
        whole(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(capture.Capture, "_copy_and_offer", late)
    yield go_on
    go_on.set()


def test_flush_waits_for_copies(
    trainer: FakeTrainer, connect: Connect, held: threading.Event
) -> None:
    bridge = connect(model=(model := make_model()), version=1)
    ship(bridge, model, batch((9, 12)))
    assert not bridge.flush(0.0)
    held.set()
    assert bridge.flush(DEADLINE)
    assert bridge.stats().accepted == len(trainer.samples) == 2


def test_close_ships_what_is_still_to_be_copied(
    trainer: FakeTrainer, connect: Connect, held: threading.Event
) -> None:
    bridge = connect(model=(model := make_model()), drain_seconds=DEADLINE, version=1)
    # One copy runs, another one waits.
    ship(bridge, model, batch((9, 12)))
    ship(bridge, model, batch((7, 8)))
    closing = threading.Thread(target=bridge.close)
    closing.start()
    side = bridge._copier
    with side._changed:
        assert side._changed.wait_for(lambda: side._closed, DEADLINE)
    held.set()
    closing.join(DEADLINE)
    assert bridge.stats().accepted == len(trainer.samples) == 4


def test_logprobs_are_of_weights_that_made_the_pass(
    trainer: FakeTrainer, connect: Connect, held: threading.Event
) -> None:
    model, data = make_model(), batch((9,))
    with torch.no_grad():
        (expected,) = own_logprobs(model(data["input_ids"]).logits, data["input_ids"])
    bridge = connect(model=model, version=1)
    ship(bridge, model, data)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    held.set()
    assert bridge.flush(DEADLINE)
    (sample,) = trainer.samples.values()
    torch.testing.assert_close(trainer.tensor(sample, "sampled_logprobs")[1:], expected)


def test_states_written_between_ship_and_copy_refused(
    trainer: FakeTrainer, connect: Connect, held: threading.Event
) -> None:
    model, data = make_model(), batch((9,))
    seen: list[torch.Tensor] = []
    model.model.layers[4].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    bridge = connect(model=model, strict=True, version=1)
    with torch.no_grad():
        ship(bridge, model, data)
        seen[0].mul_(2.0)
    held.set()
    assert bridge.flush(DEADLINE)
    assert bridge.stats().captures_refused == 1
    with pytest.raises(RefusedError, match="written in place"):
        ship(bridge, model, data)
    assert bridge.stats().outbox_samples == 0 == len(trainer.samples)


def test_two_refusals_in_window_cost_the_window_only(
    trainer: FakeTrainer, connect: Connect, held: threading.Event
) -> None:
    model, data = make_model(), batch((9,))
    seen: list[torch.Tensor] = []
    hook = model.model.layers[4].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    bridge = connect(model=model, version=1)
    with torch.no_grad(), bridge.capture(forwards=2) as window:
        for _ in range(2):
            model(data["input_ids"])
            window.ship(**data)
        for state in seen:
            state.mul_(2.0)
    hook.remove()
    held.set()
    assert bridge.flush(DEADLINE)
    deliver(bridge, model, data)
    stats = bridge.stats()
    assert (stats.captures_refused, stats.accepted, stats.capture_off_reason) == (1, 1, "")


@pytest.mark.parametrize("tokens", [1, 7, 8, 15, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_states_are_gathered_in_blocks(tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(tokens, width, generator=generator) for width in (4096, 64, 40_000)]
    host = torch.full((tokens, 4096 + 64 + 40_000), torch.nan, dtype=dtype)
    gather_into(host, parts)
    assert torch.equal(host, torch.cat(parts, -1).to(dtype))
