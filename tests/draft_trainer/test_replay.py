"""Order, share and counts of the replay buffer, and of the store of policy versions."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.ingest.replay import ReplayBuffer
from draft_trainer.sample import Sample
from slipstream.errors import RefusedError
from slipstream.tensors import digest
from tests.draft_trainer.synthetic import Policy

TEMPLATE = Policy().samples(1)[0]


def _sample(name: str, version: int = 1) -> Sample:
    return TEMPLATE.repacked(sample_id=name, policy_version=version)


def _buffer(*options: Any, **named: Any) -> ReplayBuffer[Sample]:
    return ReplayBuffer(*options, **named)


def test_what_gives_way_is_old_then_trained_then_early() -> None:
    buffer = _buffer(0.0, max_epochs=9)
    for i in range(8):
        buffer.add(_sample(f"s{i}", version=i // 4))
    one = TEMPLATE.tokens
    drawn = [buffer.draw(one)[0].sample_id for _ in range(6)]
    assert set(drawn[:4]) == {"s4", "s5", "s6", "s7"}
    gone = []
    while (worst := next(buffer.worst(), None)) is not None:
        gone.append((worst.sample_id, buffer.remove(worst)))
    # Version 0: drawn ones first, then by arrival; then version 1, by times drawn, by arrival.
    times = {name: drawn.count(name) for name, _ in gone}
    expected = sorted(times, key=lambda name: (int(name[1]) // 4, -times[name], name))
    assert [name for name, _ in gone] == expected
    assert [untrained for _, untrained in gone] == [times[name] == 0 for name in expected]
    assert len(buffer) == 0 == buffer.pending


def test_spared_samples_stay_and_come_up_again() -> None:
    buffer = _buffer(0.0)
    for i in range(4):
        buffer.add(_sample(f"s{i}"))
    worst = next(buffer.worst(lambda sample: sample.sample_id in {"s0", "s1"}), None)
    assert worst is not None and worst.sample_id == "s2"
    assert not list(buffer.worst(lambda sample: True))
    assert [sample.sample_id for sample in buffer.worst()] == ["s0", "s1", "s2", "s3"]


def test_a_sample_is_drawn_at_most_max_epochs_times() -> None:
    buffer = _buffer(0.0, max_epochs=2)
    for i in range(5):
        buffer.add(_sample(f"s{i}"))
    assert buffer.pending == 5
    counts = dict.fromkeys((f"s{i}" for i in range(5)), 0)
    while drawn := buffer.draw(2 * TEMPLATE.tokens):
        assert len(drawn) <= 2
        for sample in drawn:
            counts[sample.sample_id] += 1
    assert set(counts.values()) == {2}
    assert len(buffer) == 0 == buffer.pending


def test_untrained_before_trained_and_newest_before_old() -> None:
    buffer = _buffer(0.0, max_epochs=9)
    buffer.add(_sample("old", 1))
    buffer.add(_sample("new", 3))
    one = TEMPLATE.tokens
    names = [buffer.draw(one)[0].sample_id for _ in range(2)]
    assert names == ["new", "new"]
    buffer.add(_sample("newer", 4))
    assert buffer.draw(one)[0].sample_id == "newer"
    assert buffer.pending == 1
    assert len(buffer.draw(1)) == 1  # one sample even above the bound


def test_the_order_is_that_of_the_seed_and_not_of_what_was_drawn_before() -> None:
    def drawn_after(interruptions: int, seed: int) -> list[str]:
        buffer = _buffer(0.0, 3, seed)
        for i in range(30):
            buffer.add(_sample(f"s{i}", i % 2))
        names = []
        for step in range(200):
            if step < interruptions:
                for sample in buffer.draw(7 * TEMPLATE.tokens):
                    buffer.put_back(sample)
            names += [sample.sample_id for sample in buffer.draw(5 * TEMPLATE.tokens)]
        assert {names.count(name) for name in names} == {3} and len(names) == 90
        return names

    assert drawn_after(0, 1) == drawn_after(9, 1) != drawn_after(0, 2)


def test_stale_items_do_not_pile_up() -> None:
    buffer = _buffer(0.0)
    for i in range(5000):
        buffer.add(_sample(f"s{i}"))
        if i >= 10:
            worst = next(buffer.worst(), None)
            assert worst is not None and worst.sample_id == f"s{i - 10}"
            buffer.remove(worst)
    queues = (buffer._fresh, buffer._to_draw, buffer._to_evict)
    assert max(map(len, queues)) <= 100


def test_against_a_model_that_sorts() -> None:
    """Random adds, draws, undone draws and evictions."""
    rng = random.Random(0)
    buffer = _buffer(0.3, max_epochs=3)
    model: dict[str, list[int]] = {}
    for i in range(3000):
        action = rng.random()
        if action < 0.45:
            sample = _with_prompt(_sample(f"s{i}", i // 400), rng.randrange(40))
            buffer.add(sample)
            model[f"s{i}"] = [sample.policy_version, 0]
        elif action < 0.75:
            held = {sample.sample_id for sample in buffer.held_out()}
            drawn = buffer.draw(rng.randrange(1, 80))
            left = sorted(v[1] - v[0] for n, v in model.items() if n not in held)
            assert [model[s.sample_id][1] - s.policy_version for s in drawn] == left[: len(drawn)]
            undo = rng.random() < 0.3
            for sample in drawn:
                model[sample.sample_id][1] += 1
                if model[sample.sample_id][1] == 3 and not undo:
                    del model[sample.sample_id]
                if undo:
                    model[sample.sample_id][1] -= 1
                    buffer.put_back(sample)
        elif (worst := next(buffer.worst(), None)) is not None:
            least = min((version, -times) for version, times in model.values())
            version, times = model.pop(worst.sample_id)
            assert (version, -times) == least
            buffer.remove(worst)
        assert {sample.sample_id for sample in buffer} == model.keys()
    held = {sample.sample_id for sample in buffer.held_out()}
    assert buffer.pending == sum(v[1] == 0 for n, v in model.items() if n not in held)


def _with_prompt(sample: Sample, number: int) -> Sample:
    tokens = sample.token_ids.clone()
    tokens[0], tokens[1] = divmod(number, 20)
    return sample.repacked(token_ids=tokens)


def test_completions_of_one_prompt_are_held_out_together() -> None:
    """By sample, a candidate would be judged on prompts that it was trained on."""
    buffer = _buffer(0.5)
    for i in range(40):
        buffer.add(_with_prompt(_sample(f"s{i}"), i % 10))
    held = [s.group for s in buffer.held_out()]
    drawn = [s.group for s in buffer.draw(10**9)]
    assert len(held) + len(drawn) == 40
    assert not set(held) & set(drawn)
    assert {held.count(group) for group in held} == {4}


def test_a_window_without_its_prompt_is_a_group_of_its_own() -> None:
    windows = [
        _sample(name).repacked(loss_mask=torch.ones_like(TEMPLATE.loss_mask))
        for name in ("w0", "w1")
    ]
    assert [w.group for w in windows] == ["w0", "w1"]
    assert _sample("a").group == _sample("b").group


def test_held_out_is_decided_by_the_prompt_and_never_drawn() -> None:
    first, second = _buffer(0.25), _buffer(0.25)
    for i in range(400):
        first.add(_with_prompt(_sample(f"s{i}", i // 100), i))
        second.add(_with_prompt(_sample(f"s{399 - i}"), 399 - i))
    held = {s.sample_id for s in first.held_out()}
    assert held == {s.sample_id for s in second.held_out()}
    assert 60 <= len(held) <= 140  # binomial(400, 1/4): 4.6 standard deviations either way
    assert first.pending == 400 - len(held)
    assert not held & {s.sample_id for s in first.draw(10**9)}
    assert {s.policy_version for s in first.held_out(newest_versions=2)} == {2, 3}


def test_policy_heads_share_equal_matrices_and_stay_bounded() -> None:
    store = PolicyHeads(keep=2)
    embed, rows = torch.randn(24, 16), torch.randn(16, 16)
    assert store.add(PolicyHead(1, rows, embed)) == ()
    assert store.add(PolicyHead(3, rows + 1, embed.clone())) == ()
    assert store.get(3).embed_tokens is embed
    assert store.tensor(digest(rows)) is rows
    assert store.add(PolicyHead(4, rows + 2, embed.clone())) == (1,)
    assert store.versions == (3, 4) and 1 not in store and 4 in store
    assert store.tensor(digest(rows)) is None
    assert store.get(4).embed_tokens is embed
    with pytest.raises(RefusedError, match="policy_version: found 1"):
        store.get(1)
    with pytest.raises(RefusedError, match="higher than 4"):
        store.add(PolicyHead(4, rows, embed))
