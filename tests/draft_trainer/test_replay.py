"""Bounds, order and counts of the replay buffer, and of the store of policy versions."""

from __future__ import annotations

import dataclasses
import random
import threading

import pytest
import torch

from draft_trainer.eagle3.policy_head import PolicyHead, PolicyHeads
from draft_trainer.feed.replay import ReplayBuffer
from draft_trainer.feed.sample import Sample
from slipstream.refusal import RefusedError
from slipstream.tensors import digest
from tests.draft_trainer.synthetic import Policy

TEMPLATE = Policy().samples(1)[0]


def _sample(name: str, version: int = 1) -> Sample:
    return dataclasses.replace(TEMPLATE, sample_id=name, policy_version=version)


def test_bytes_never_exceed_the_capacity_and_old_versions_go_first() -> None:
    size = TEMPLATE.nbytes
    buffer = ReplayBuffer(10 * size, 0.0)
    for i in range(40):
        buffer.add(_sample(f"s{i}", version=i // 4))
        assert buffer.nbytes <= buffer.capacity_bytes
    assert len(buffer) == 10 and buffer.nbytes == 10 * size
    assert buffer.evicted_untrained == 30
    drawn = buffer.draw(10**6, random.Random(0))
    assert {s.sample_id for s in drawn} == {f"s{i}" for i in range(30, 40)}
    assert [s.policy_version for s in drawn] == [9] * 4 + [8] * 4 + [7] * 2


def test_nbytes_counts_every_tensor() -> None:
    tensors = [v for v in vars(TEMPLATE).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 8
    assert TEMPLATE.nbytes == sum(t.numel() * t.element_size() for t in tensors)


def test_a_sample_is_drawn_at_most_max_epochs_times() -> None:
    buffer = ReplayBuffer(10**9, 0.0, max_epochs=2)
    for i in range(5):
        buffer.add(_sample(f"s{i}"))
    assert buffer.pending == 5
    rng, counts = random.Random(0), dict.fromkeys((f"s{i}" for i in range(5)), 0)
    while drawn := buffer.draw(2 * TEMPLATE.num_tokens, rng):
        assert len(drawn) <= 2
        for sample in drawn:
            counts[sample.sample_id] += 1
    assert set(counts.values()) == {2}
    assert len(buffer) == 0 and buffer.nbytes == 0 and buffer.evicted_untrained == 0


def test_untrained_before_trained_and_newest_before_old() -> None:
    buffer = ReplayBuffer(10**9, 0.0, max_epochs=9)
    buffer.add(_sample("old", 1))
    buffer.add(_sample("new", 3))
    one = TEMPLATE.num_tokens
    names = [buffer.draw(one, random.Random(i))[0].sample_id for i in range(2)]
    assert names == ["new", "new"]
    buffer.add(_sample("newer", 4))
    assert buffer.draw(one, random.Random(0))[0].sample_id == "newer"
    assert buffer.pending == 1
    assert len(buffer.draw(1, random.Random(0))) == 1  # one sample even above the bound


def _with_prompt(sample: Sample, number: int) -> Sample:
    tokens = sample.token_ids.clone()
    tokens[0], tokens[1] = divmod(number, 20)
    return dataclasses.replace(sample, token_ids=tokens)


def test_completions_of_one_prompt_are_held_out_together() -> None:
    """By sample, a candidate would be judged on prompts that it was trained on."""
    buffer = ReplayBuffer(10**9, 0.5)
    for i in range(40):
        buffer.add(_with_prompt(_sample(f"s{i}"), i % 10))
    held = [s.group for s in buffer.held_out()]
    drawn = [s.group for s in buffer.draw(10**9, random.Random(0))]
    assert len(held) + len(drawn) == 40
    assert not set(held) & set(drawn)
    assert {held.count(group) for group in held} == {4}


def test_a_window_without_its_prompt_is_a_group_of_its_own() -> None:
    windows = [
        dataclasses.replace(_sample(name), loss_mask=torch.ones_like(TEMPLATE.loss_mask))
        for name in ("w0", "w1")
    ]
    assert [w.group for w in windows] == ["w0", "w1"]
    assert _sample("a").group == _sample("b").group


def test_held_out_is_decided_by_the_prompt_and_never_drawn() -> None:
    first, second = ReplayBuffer(10**9, 0.25), ReplayBuffer(10**9, 0.25)
    for i in range(400):
        first.add(_with_prompt(_sample(f"s{i}", i // 100), i))
        second.add(_with_prompt(_sample(f"s{399 - i}"), 399 - i))
    held = {s.sample_id for s in first.held_out()}
    assert held == {s.sample_id for s in second.held_out()}
    assert 60 <= len(held) <= 140  # binomial(400, 1/4): 4.6 standard deviations either way
    assert first.pending == 400 - len(held)
    assert not held & {s.sample_id for s in first.draw(10**9, random.Random(0))}
    assert {s.policy_version for s in first.held_out(newest_versions=2)} == {2, 3}


def test_discarded_versions_are_counted_and_refusals_change_nothing() -> None:
    buffer = ReplayBuffer(2 * TEMPLATE.nbytes, 0.0)
    buffer.add(_sample("a", 1))
    buffer.add(_sample("b", 2))
    with pytest.raises(RefusedError, match="sample_id"):
        buffer.add(_sample("a", 2))
    long = dataclasses.replace(_sample("c"), aux=TEMPLATE.aux.repeat(9, 1))
    with pytest.raises(RefusedError, match="replay buffer"):
        buffer.add(long)
    assert len(buffer) == 2 and buffer.evicted_untrained == 0
    buffer.discard_versions([1])
    assert len(buffer) == 1 and buffer.evicted_untrained == 1


def test_adds_and_draws_from_many_threads_lose_nothing() -> None:
    buffer = ReplayBuffer(10**9, 0.0, max_epochs=1)
    drawn: list[list[str]] = [[] for _ in range(2)]
    done = threading.Event()

    def add(part: int) -> None:
        for i in range(200):
            buffer.add(_sample(f"{part}-{i}"))

    def draw(part: int) -> None:
        rng = random.Random(part)
        while True:
            last = done.is_set()
            samples = buffer.draw(100, rng)
            drawn[part] += [s.sample_id for s in samples]
            if last and not samples:
                return

    adders = [threading.Thread(target=add, args=(i,)) for i in range(3)]
    drawers = [threading.Thread(target=draw, args=(i,)) for i in range(2)]
    for thread in (*adders, *drawers):
        thread.start()
    for thread in adders:
        thread.join(60)
    done.set()
    for thread in drawers:
        thread.join(60)
    names = drawn[0] + drawn[1]
    assert len(names) == len(set(names)) == 600


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
