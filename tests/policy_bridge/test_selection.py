"""The byte budget, the windows, and the choice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from policy_bridge.selection import (
    Candidate,
    Spent,
    bytes_per_token,
    choose,
    windows,
)
from slipstream.sample import Sample
from tests.tiny import tiny_qwen3

from .conftest import HIDDEN, Connect, batch, deliver, make_model, ship, sync
from .doubles import DEADLINE, FakeTrainer
from .windows import Windows


def candidates(sizes: Sequence[int], seed: int = 0) -> list[Candidate]:
    draw = random.Random(seed).random
    return [Candidate(row, 0, n, 0, 0, n * 10, lot=draw()) for row, n in enumerate(sizes)]


def test_choice_fills_budget_in_order_of_lots() -> None:
    pool = candidates([5] * 20)
    first = choose(pool, 500)
    assert len(first) == 10 and sum(c.nbytes for c in first) == 500
    assert first == choose(pool[::-1], 500)
    assert [c.row for c in first] != [c.row for c in choose(candidates([5] * 20, 1), 500)]


def test_choice_passes_over_samples_that_do_not_fit() -> None:
    pool = [
        replace(one, lot=lot) for one, lot in zip(candidates([6, 5, 4]), (0, 1, 2), strict=True)
    ]
    assert [c.row for c in choose(pool, 100)] == [0, 2]
    assert choose(pool, 30) == []


def test_choice_is_uniform() -> None:
    """Null: each of 20 equal candidates is chosen with probability 1/2 per draw.

    Over 2000 draws a count has standard deviation 22; 6 of those in any of 20
    counts happen by chance less than once in ten million times.
    """
    counts = [0] * 20
    for seed in range(2000):
        for chosen in choose(candidates([5] * 20, seed), 500):
            counts[chosen.row] += 1
    assert sum(counts) == 20_000
    assert all(abs(count - 1000) < 6 * 22.4 for count in counts)


def test_choice_order_is_shedding_priority() -> None:
    priorities: list[tuple[int, int]] = []
    model, data = tiny_qwen3(), batch((9, 9, 9, 9))
    lots = iter((0.3, 0.1, 0.4, 0.2))

    def offer(sample: Sample, priority: int) -> bool:
        rows = data["input_ids"].tolist()
        priorities.append((rows.index(sample.token_ids.tolist()), priority))
        return True

    with torch.no_grad(), Windows(model).open(offer=offer, draw=lots.__next__) as capture:
        model(data["input_ids"])
        capture.ship(data["input_ids"], loss_mask=data["loss_mask"])
    assert priorities == [(1, 15), (3, 11), (0, 7), (2, 3)]


def cut(length: int, max_tokens: int, completion_from: int = 0) -> list[Candidate]:
    mask = [i >= completion_from for i in range(length)]
    return windows(row=0, start=4, loss_mask=mask, token_bytes=1, max_tokens=max_tokens)


@pytest.mark.parametrize(("length", "most"), [(101, 100), (250, 100), (1000, 100), (16_384, 2048)])
def test_sequence_windows_cover_tokens_once_with_context(length: int, most: int) -> None:
    found = cut(length, most)
    fresh = [column for w in found for column in range(w.fresh, w.end)]
    assert fresh == list(range(4, 4 + length))
    assert all(w.tokens <= most for w in found)
    assert all(w.fresh - w.start == most / 4 for w in found[1:])
    assert sum(w.nbytes for w in found) <= length * 4 / 3


def test_sequence_windows_without_target_are_left_out() -> None:
    assert cut(300, 100, completion_from=300) == []
    # The first two tokens of a sample cannot be predicted by any anchor of it.
    assert windows(row=0, start=0, loss_mask=[True, True], token_bytes=1, max_tokens=9) == []
    assert [w.offset for w in cut(300, 100, completion_from=290)] == [225]


def test_bytes_per_step_bounds_shipped_samples(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((10,) * 12)
    token = bytes_per_token(3, HIDDEN, torch.float32)
    assert token == 4 * HIDDEN * 4 + 21
    bridge = connect(model=model, bytes_per_step=35 * token, version=1)
    deliver(bridge, model, data)
    stats = bridge.stats()
    assert (stats.chosen_samples, stats.chosen_tokens, stats.not_chosen_samples) == (3, 30, 9)
    assert stats.captured_tokens == 120
    assert len(trainer.samples) == stats.accepted == 3
    states = sum(s.aux.nbytes + s.final_hidden.nbytes for s in trainer.samples.values())
    assert states == 30 * 4 * HIDDEN * 4


def test_wanted_tokens_bound_samples_of_version(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((10,) * 12)
    bridge = connect(model=model)
    for version, wanted, more in ((1, 45, 12), (2, 45, 4), (3, 0, 4), (4, 0, 12)):
        sync(bridge, version)
        before = len(trainer.samples)
        trainer.wanted_tokens = wanted
        deliver(bridge, model, data)
        assert len(trainer.samples) - before == more, "each answer holds from then on"


def test_wanted_tokens_survive_reconnect(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((10,) * 12)
    trainer.wanted_tokens = 45
    server = trainer.serve()
    bridge = connect(server.address, model=model, version=1)
    deliver(bridge, model, data)
    assert len(trainer.samples) == 12
    server.kill()
    with trainer.serve(server.port):
        trainer.wait_for(lambda: trainer.sessions == 2)
        assert bridge.wait_connected(DEADLINE)
        sync(bridge, 2)
        deliver(bridge, model, data)
    assert len(trainer.samples) == 12 + 4


def test_wanted_tokens_below_one_sequence_still_send_one(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model = make_model()
    bridge = connect(model=model)
    for version, tokens, wanted, more in ((1, 10, 10, 4), (2, 15, 10, 1), (3, 15, 0, 1)):
        sync(bridge, version)
        trainer.wanted_tokens = wanted
        deliver(bridge, model, batch((tokens,) * 4))
        assert sum(s.policy_version == version for s in trainer.samples.values()) == more
    sync(bridge, 4)
    deliver(bridge, model, batch((15,) * 4))
    assert len(trainer.samples) == 6 + 4, "as many as there are"


def test_first_sample_of_version_may_exceed_budget() -> None:
    pool = candidates([5, 50, 5])
    spent = Spent(first_bytes=60)
    (first,) = spent.choose(pool, 40)
    assert first in (pool[0], pool[2]) and first == min(pool[::2], key=lambda one: one.lot)
    assert spent.choose(pool, 40, passes_left=2) == [], "one of the last pass may fit"
    spent.add([first])
    assert spent.choose(pool, 40) == []
    assert Spent().choose(pool, 40) == Spent(first_bytes=49).choose(pool, 40) == []
    assert len(Spent(first_bytes=60).choose(pool, 50)) == 1
    assert len(Spent(first_bytes=60).choose(pool, 100)) == 2


def test_wanted_tokens_are_shared_by_windows_of_version(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model, data = make_model(), batch((10,))
    bridge = connect(model=model)
    trainer.wanted_tokens = 45
    for version in (1, 2):
        sync(bridge, version)
        for _ in range(7):
            deliver(bridge, model, data)
    assert [sample.policy_version for sample in trainer.samples.values()] == [1] * 4 + [2] * 4
    assert (bridge.stats().captures, bridge.stats().captures_skipped) == (8, 6)


@pytest.mark.parametrize(("tokens", "taken"), [(15, 1), (25, 2)])
def test_bytes_per_step_is_shared_by_windows_of_version(
    trainer: FakeTrainer, connect: Connect, tokens: int, taken: int
) -> None:
    model, data = make_model(), batch((10,))
    bridge = connect(model=model, bytes_per_step=tokens * bytes_per_token(3, HIDDEN, torch.float32))
    for version in (1, 2):
        sync(bridge, version)
        for _ in range(4):
            ship(bridge, model, data)
        assert bridge.flush(DEADLINE)
    versions = [sample.policy_version for sample in trainer.samples.values()]
    assert versions == [1] * taken + [2] * taken
    stats = bridge.stats()
    # Into what is left then, hardly a sequence fits.
    assert (stats.captures, stats.captures_skipped) == (2 * taken, 2 * (4 - taken))
    assert stats.capture_off_reason == ""


@pytest.mark.parametrize("forwards", [None, 4])
def test_bytes_per_step_holds_over_micro_batches(
    trainer: FakeTrainer, connect: Connect, forwards: int | None
) -> None:
    model, data = make_model(), batch((10,) * 12)
    budget = 60 * bytes_per_token(3, HIDDEN, torch.float32)
    bridge = connect(model=model, bytes_per_step=budget, version=1)
    with torch.no_grad(), bridge.capture(forwards=forwards) as capture:
        for start in range(0, 12, 3):
            rows = slice(start, start + 3)
            model(data["input_ids"][rows])
            capture.ship(data["input_ids"][rows], loss_mask=data["loss_mask"][rows])
    assert bridge.flush(DEADLINE)
    assert len(trainer.samples) == 6


def test_long_sequences_arrive_as_sequence_windows(trainer: FakeTrainer, connect: Connect) -> None:
    trainer.max_tokens = 16
    model, data = make_model(), batch((40,), "left")
    bridge = connect(model=model, version=1)
    deliver(bridge, model, data)
    ids, targets = data["input_ids"][0].tolist(), []
    for sample in trainer.samples.values():
        positions = trainer.tensor(sample, "positions").tolist()
        assert len(positions) <= 16
        assert trainer.tensor(sample, "token_ids").tolist() == [ids[p] for p in positions]
        mask = trainer.tensor(sample, "loss_mask").tolist()
        targets += [p for p, kept in zip(positions, mask, strict=True) if kept]
    assert sorted(targets) == list(range(3, 40))
