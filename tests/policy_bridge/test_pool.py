"""Host memory is lent, not allocated; a loan ends when nobody can read it any more."""

from __future__ import annotations

import itertools
import random

import torch

from policy_bridge.outbox import ALIGNMENT, HostPool


def test_a_loan_ends_with_the_last_view_of_it() -> None:
    pool = HostPool(1 << 16)
    first, second = pool.take(1000), pool.take(2000)
    assert first is not None and second is not None
    assert pool.held == 1024 + 2048
    state = first[:400].view(torch.float32).reshape(10, 10)
    message = memoryview(second.numpy())
    del first, second
    assert pool.held == 1024 + 2048
    del state
    assert pool.held == 2048
    del message
    assert pool.held == 0
    whole = pool.take(1 << 16)
    assert whole is not None and pool.take(1) is None


def test_freed_memory_is_used_again_and_gaps_join() -> None:
    pool = HostPool(4096)
    loans = [pool.take(1024) for _ in range(4)]
    address = loans[1].data_ptr()  # type: ignore[union-attr]
    loans[1] = None
    again = pool.take(1000)
    assert again is not None and again.data_ptr() == address
    again = None
    loans[2] = None
    joined = pool.take(2048)
    assert joined is not None and joined.data_ptr() == address


def test_loans_never_overlap_and_what_is_held_is_what_is_lent() -> None:
    pool, rng = HostPool(1 << 16), random.Random(0)
    held: list[torch.Tensor] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held)))
        else:
            held.extend(filter(lambda loan: loan is not None, [pool.take(rng.randrange(1, 4000))]))
        spans = sorted((loan.data_ptr(), loan.data_ptr() + loan.nbytes) for loan in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        rounded = sum(-(-loan.nbytes // ALIGNMENT) * ALIGNMENT for loan in held)
        assert pool.held == rounded <= pool.capacity
    held.clear()
    assert pool.held == 0 and pool.take(1 << 16) is not None
