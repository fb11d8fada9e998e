"""The queue gives what sorting gives, whatever the order in which items come and go."""

from __future__ import annotations

import random

import pytest

from draft_trainer.ingest.replay import MostlySorted


@pytest.mark.parametrize("in_order", [0.0, 0.7, 1.0])
def test_against_a_list_that_is_sorted(in_order: float) -> None:
    rng = random.Random(0)
    queue: MostlySorted[tuple[int, int]] = MostlySorted()
    model: list[tuple[int, int]] = []
    largest = 0
    for number in range(4000):
        action = rng.random()
        if action < 0.55:
            largest += 1
            item = (largest if rng.random() < in_order else rng.randrange(largest), number)
            queue.push(item)
            model.append(item)
        elif action < 0.99:
            model.sort()
            if model:
                assert queue.pop() == model.pop(0)
        else:
            queue.keep(lambda item: item[1] % 3 > 0)
            model = [item for item in model if item[1] % 3]
        assert len(queue) == len(model)
    assert sorted(queue) == sorted(model)
    assert [queue.pop() for _ in range(len(queue))] == sorted(model)
    with pytest.raises(IndexError):
        queue.pop()


def test_what_comes_in_order_is_not_compared_with_more_than_one_other() -> None:
    class Counted(tuple[int]):
        compared = 0

        def __gt__(self, other: object) -> bool:
            Counted.compared += 1
            return tuple.__gt__(self, other)  # type: ignore[operator]

        __slots__ = ()

    queue: MostlySorted[Counted] = MostlySorted()
    for number in range(1000):
        queue.push(Counted((number,)))
    assert [queue.pop()[0] for _ in range(1000)] == list(range(1000))
    assert Counted.compared == 999
