"""Held out means the prompt: every window of every completion of it, whatever is masked."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from draft_trainer.ingest.database import FILE
from draft_trainer.ingest.store import SampleStore
from policy_bridge.session import Session
from slipstream.errors import RefusedError
from slipstream.sample import Sample, is_held_out, prompt_hash
from tests.draft_trainer.samples import all_drawn, open_store, put, received, sealed
from tests.policy_bridge.conftest import VOCAB, make_model
from tests.policy_bridge.windows import LAYERS, Windows

PROMPTS, COMPLETIONS, MAX_TOKENS = 30, 3, 24
FRACTION = 0.3


@pytest.fixture(scope="module")
def captured() -> tuple[list[Sample], list[list[int]]]:
    """Windows of long completions whose loss masks leave out parts, their beginning too."""
    rng = random.Random(0)
    windows = Windows(make_model())
    session = Session("s", LAYERS, torch.arange(VOCAB), MAX_TOKENS, None, ())
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, 12))] for _ in range(PROMPTS)]
    with windows.open(session=session) as capture, torch.no_grad():
        for prompt in prompts:
            rows = []
            for _ in range(COMPLETIONS):
                size = rng.randrange(10, 90)
                rows.append(prompt + [rng.randrange(VOCAB) for _ in range(size)])
            width = max(map(len, rows))
            ids = torch.zeros(COMPLETIONS, width, dtype=torch.int64)
            attention, mask = ids.bool(), ids.bool()
            for row, tokens in enumerate(rows):
                left = width - len(tokens) if rng.random() < 0.5 else 0
                columns = slice(left, left + len(tokens))
                ids[row, columns], attention[row, columns] = torch.tensor(tokens), True
                mask[row, columns] = torch.rand(len(tokens)) < 0.7
                mask[row, left : left + len(prompt) + rng.randrange(6)] = False
            windows.model(input_ids=ids, attention_mask=attention)
            capture.ship(
                ids,
                loss_mask=mask,
                attention_mask=attention,
                prompt_lengths=[len(prompt)] * COMPLETIONS,
                rollout_versions=[1, 0, 1],
            )
    return windows.samples, prompts


def stored(store: SampleStore, samples: list[Sample]) -> None:
    for sample in samples:
        block = torch.from_numpy(store.reserve(sample.nbytes))
        block.copy_(sample.block[: sample.nbytes])
        assert store.accept("run", [sealed(Sample(sample.header, block))]) == [True]


def test_held_out_prompt_trains_no_window(
    tmp_path: Path, captured: tuple[list[Sample], list[list[int]]]
) -> None:
    samples, prompts = captured
    names = {prompt_hash(torch.tensor(prompt)).hex() for prompt in prompts}
    assert {sample.group for sample in samples} == names and len(names) == PROMPTS
    later = [sample for sample in samples if int(sample.positions[0]) > 0]
    assert len(later) > PROMPTS
    store = open_store(tmp_path, 1 << 22, held_out_fraction=FRACTION)
    store.begin("run", {})
    stored(store, samples)
    held = {sample.sample_id for sample in store.held_out("run")}
    drawn = set(all_drawn(store))
    assert held | drawn == {sample.sample_id for sample in samples} and not held & drawn
    of_prompt: defaultdict[str, set[bool]] = defaultdict(set)
    for sample in samples:
        of_prompt[sample.group].add(sample.sample_id in held)
    assert all(len(both) == 1 for both in of_prompt.values())
    shares = sum(is_held_out(name, FRACTION) for name in names)
    assert shares == sum(both == {True} for both in of_prompt.values()) > 3


def of_prompts(store: SampleStore, version: int, prompts: range) -> None:
    """A policy version is registered and brings one completion of each prompt."""
    assert store.run is not None
    run_id, _ = store.run
    store.put_policy(run_id, version, ["aa", "bb"])
    for prompt in prompts:
        name = f"v{version}-{prompt}"
        assert store.accept(run_id, [received(store, name, version, prompt=prompt)]) == [True]


def held_prompts(store: SampleStore, *versions: int) -> set[str]:
    assert store.run is not None
    return {s.group for s in store.held_out(store.run[0]) if s.policy_version in versions}


def test_held_out_share_shrinks_with_the_run(tmp_path: Path) -> None:
    small, large = (
        open_store(tmp_path / name, 1 << 23, held_out_fraction=None) for name in ("small", "large")
    )
    for store in (small, large):
        store.begin("run", {})
    for version in range(1, 5):
        of_prompts(small, version, range(24 * version, 24 * version + 24))
    # Binomial(96, 1/4): three standard deviations either way.
    assert 11 <= len(held_prompts(small, 1, 2, 3, 4)) <= 37
    of_prompts(large, 1, range(400))
    before = held_prompts(large, 1)
    assert 70 <= len(before) <= 130
    drawn = set(all_drawn(large))
    of_prompts(large, 2, range(400, 800))
    after = held_prompts(large, 1)
    assert 20 <= len(after) <= 60 and after < before
    assert 20 <= len(held_prompts(large, 2)) <= 60
    # What was given back trains now; what trained before was never held out, nor is it now.
    freed = set(all_drawn(large)) & {f"v1-{prompt}" for prompt in range(400)}
    assert len(freed - drawn) == len(before) - len(after)
    assert all(is_held_out(group, 0.25) for group in before)
    assert all(is_held_out(group, 0.1) for group in after)
    large.close()
    large = open_store(tmp_path / "large", 1 << 23, held_out_fraction=None)
    of_prompts(large, 3, range(800, 1200))
    assert 20 <= len(held_prompts(large, 3)) <= 60 and held_prompts(large, 1) == after
    # Another run begins with much again.
    large.begin("another", {})
    of_prompts(large, 1, range(400))
    assert len(held_prompts(large, 1)) == len(before)


def test_held_out_share_survives_damaged_index(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1 << 23, held_out_fraction=None)
    store.begin("run", {})
    of_prompts(store, 1, range(400))
    of_prompts(store, 2, range(400, 800))
    assert 20 <= len(held_prompts(store, 2)) <= 60
    # Nothing of the index is left, in the file or in memory.
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._db.execute("PRAGMA shrink_memory")
    (tmp_path / FILE).write_bytes(b"x" * (1 << 16))
    assert store.counts().resident == 0
    of_prompts(store, 3, range(400))
    assert 20 <= len(held_prompts(store, 3)) <= 60, "else on prompts that were trained on"


def test_held_out_fraction_of_the_toml_is_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1 << 22, held_out_fraction=0.5)
    store.begin("run", {})
    of_prompts(store, 1, range(400))
    before = held_prompts(store, 1)
    of_prompts(store, 2, range(400))
    assert len(before) > 150 and held_prompts(store, 1) == held_prompts(store, 2) == before


def completions_of(store: SampleStore, version: int, prompts: range, count: int) -> set[str]:
    """A policy version is registered and brings ``count`` completions of each prompt."""
    assert store.run is not None
    run_id, _ = store.run
    store.put_policy(run_id, version, ["aa", "bb"])
    names = {
        f"v{version}-{prompt}-{number}": prompt for prompt in prompts for number in range(count)
    }
    for name, prompt in names.items():
        assert store.accept(run_id, [received(store, name, version, prompt=prompt)]) == [True]
    return set(names)


@pytest.mark.parametrize(("prompts", "count", "known"), [(1, 8, 1), (4, 8, 1), (8, 4, 2)])
def test_few_prompts_hold_out_completions(
    tmp_path: Path, prompts: int, count: int, known: int
) -> None:
    """Else the gate has one or two clusters, or training has nothing, for as long as the run.

    Eight prompts in the first version may be followed by eight others.
    """
    store = open_store(tmp_path, 1 << 23, held_out_fraction=None)
    store.begin("run", {})
    names = set[str]()
    for version in range(1, known + 1):
        names |= completions_of(store, version, range(prompts), count)
        assert not store.held_out_by_completion, "not known before the version ends"
    for version in range(known + 1, known + 4):
        names |= completions_of(store, version, range(prompts), count)
        assert store.held_out_by_completion
        # The same after a restart, and for what is sent again.
        before = {sample.sample_id for sample in store.held_out("run")}
        store.close()
        store = open_store(tmp_path, 1 << 23, held_out_fraction=None)
        assert store.held_out_by_completion
        assert {sample.sample_id for sample in store.held_out("run")} == before
        again = received(store, f"v{version}-0-0", version, prompt=0)
        assert store.accept("run", [again]) == [False]
    held = store.held_out("run")
    chosen = {sample.sample_id for sample in held}
    drawn = set(all_drawn(store))
    assert chosen | drawn == names and not chosen & drawn
    later = [sample for sample in held if sample.policy_version > known]
    # Binomial(3 x prompts x count, 1/4): three standard deviations either way.
    total = 3 * prompts * count
    assert abs(len(later) - total / 4) < 3 * (total * 3 / 16) ** 0.5
    assert len({sample.group for sample in later}) >= min(prompts, 4)
    assert all(is_held_out(sample.completion, 0.25) for sample in later)


def test_prompts_new_in_each_version_are_held_out(tmp_path: Path) -> None:
    """Eight of forty in five versions are enough, and the draft has seen none of them."""
    store = open_store(tmp_path, 1 << 23, held_out_fraction=None)
    store.begin("run", {})
    for version in range(1, 11):
        completions_of(store, version, range(8 * version, 8 * version + 8), 4)
        assert not store.held_out_by_completion
    held = {sample.group for sample in store.held_out("run")}
    assert all(is_held_out(group, 0.25) for group in held)
    drawn = {sample.group for sample in store.draw("run", 10**9).samples}
    assert drawn and not held & drawn


def test_windows_of_a_completion_are_held_out_together(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1 << 23, held_out_fraction=None)
    store.begin("run", {})
    completions_of(store, 1, range(2), 8)
    store.put_policy("run", 2, ["aa", "bb"])
    for number in range(40):
        for window in ("", "+16", "+32"):
            sample = received(store, f"c{number}{window}", 2, prompt=1)
            assert store.accept("run", [sample]) == [True]
    windows: defaultdict[str, int] = defaultdict(int)
    for sample in store.held_out("run"):
        if sample.policy_version == 2:
            windows[sample.completion] += 1
    assert 3 <= len(windows) <= 19 and set(windows.values()) == {3}


def test_many_prompts_hold_out_prompts_whatever_follows(tmp_path: Path) -> None:
    """A loop sends a sample or a few of each version in a pause of training."""
    store = open_store(tmp_path, 1 << 23, held_out_fraction=None)
    store.begin("run", {})
    for version in range(1, 4):
        completions_of(store, version, range(version, version + 4), 1)
    completions_of(store, 4, range(2), 1)
    assert not store.held_out_by_completion, "too few samples to tell"
    completions_of(store, 5, range(3), 8)
    completions_of(store, 6, range(40), 2)
    assert not store.held_out_by_completion
    store.close()
    store = open_store(tmp_path, 1 << 23, held_out_fraction=None)
    for version in (7, 8, 9):
        completions_of(store, version, range(1), 16)
    assert not store.held_out_by_completion
    held = {sample.sample_id: sample.group for sample in store.held_out("run")}
    assert all(is_held_out(group, 0.25) for name, group in held.items() if name[1] in "789")
    # Another run begins anew.
    store.begin("another", {})
    completions_of(store, 1, range(2), 8)
    completions_of(store, 2, range(2), 8)
    assert store.held_out_by_completion


def test_tokens_of_a_version_is_the_newest_maximum(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1 << 20)
    assert store.tokens_of_a_version() == 0
    store.begin("run", {})
    for version, count in ((1, 40), (2, 10), (3, 20), (4, 5)):
        for number in range(count):
            put(store, f"{version}-{number}", version)
    assert store.tokens_of_a_version() == 20 * 16
    store.begin("another", {})
    assert store.tokens_of_a_version() == 0
    for number in range(3):
        put(store, f"0-{number}", 0)
    assert store.tokens_of_a_version() == 3 * 16


def test_rollout_version_travels_with_each_window(
    captured: tuple[list[Sample], list[list[int]]],
) -> None:
    samples, _ = captured
    by_version = {True: 0, False: 0}
    for sample in samples:
        assert sample.header.rollout_policy_version in (0, 1)
        assert sample.on_policy == (sample.header.rollout_policy_version == 1)
        by_version[sample.on_policy] += 1
    assert min(by_version.values()) > PROMPTS // 2


def test_prompt_follows_from_loss_mask_without_lengths() -> None:
    windows = Windows(make_model())
    ids = torch.arange(40)[None].repeat(2, 1) % VOCAB
    ids[1, 30:] = 7
    mask = torch.arange(40)[None].repeat(2, 1) >= 10
    session = Session("s", LAYERS, torch.arange(VOCAB), 16, None, ())
    with windows.open(session=session) as capture, torch.no_grad():
        windows.model(input_ids=ids)
        capture.ship(ids, loss_mask=mask)
        windows.model(input_ids=ids)
        # No prompt at all: each completion stands for itself, with all of its windows.
        capture.ship(ids, loss_mask=torch.ones_like(mask))
    groups = {sample.group for sample in windows.samples}
    assert groups == {prompt_hash(tokens).hex() for tokens in (ids[0, :10], ids[0], ids[1])}
    assert all(sample.on_policy for sample in windows.samples)


def test_invalid_prompt_lengths_are_refused() -> None:
    windows = Windows(make_model())
    ids = torch.arange(20)[None]
    for lengths in ([21], [-1], [1, 1]):
        with (
            pytest.raises(RefusedError, match="prompt_lengths"),
            windows.open() as capture,
            torch.no_grad(),
        ):
            windows.model(input_ids=ids)
            capture.ship(ids, loss_mask=ids > 4, prompt_lengths=lengths)


def test_windows_of_named_sequences_have_their_names() -> None:
    windows = Windows(make_model())
    session = Session("s", LAYERS, torch.arange(VOCAB), MAX_TOKENS, None, ())
    ids = torch.arange(2 * MAX_TOKENS).remainder(VOCAB).expand(2, -1)
    for _ in range(2):
        with windows.open(session=session) as capture, torch.no_grad():
            windows.model(input_ids=ids)
            capture.ship(ids, loss_mask=ids > 4, sample_ids=["a", "b"])
    names = [sample.sample_id for sample in windows.samples]
    first, again = names[: len(names) // 2], names[len(names) // 2 :]
    assert sorted(first) == sorted(again) and len(set(first)) == len(first) > 2
    assert {name.partition("+")[0] for name in first} == {"a", "b"}
    offsets = {s.sample_id: int(s.positions[0]) for s in windows.samples}
    assert all(int(name.partition("+")[2] or 0) == at for name, at in offsets.items())
