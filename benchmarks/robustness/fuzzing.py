"""Damaged calls of every method in turn, with sound clients served between them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.robustness.caller import Caller, Method, Tally
from benchmarks.robustness.examples_of_calls import Calls
from benchmarks.robustness.mutate import mutated
from benchmarks.robustness.services import Process

_CALLS_BETWEEN = 250


@dataclass
class Fuzzed:
    """What was found.

    Attributes:
        tally: of the damaged calls.
        served: how often a sound client was, between them.
        memory: bytes that the process took in the middle of it, and at the end.
        seconds: that it took.
    """

    tally: Tally
    served: int
    memory: tuple[int, int]
    seconds: float


def fuzz(
    process: Process,
    methods: Sequence[Method],
    calls: Calls,
    serve: Callable[[], object],
    *,
    inputs: int,
    seconds: float,
    seed: int,
) -> Fuzzed:
    """Send so many messages, or for so long.

    Args:
        process: that is called.
        methods: of it.
        calls: sound ones.
        serve: has a sound client served; raises where it is not.
        inputs: messages.
        seconds: after which no more are begun.
        seed: of all that is drawn.
    """
    rng = random.Random(seed)
    caller = Caller(process.address)
    began = time.monotonic()
    served, made, middle = 0, 0, 0
    # A session's stream takes many messages in a call: most of what is sent goes there.
    weights = [8 if method.name in ("StreamStates", "Stage") else 1 for method in methods]
    try:
        while caller.tally.inputs < inputs and time.monotonic() - began < seconds:
            if made % _CALLS_BETWEEN == 0:
                serve()
                served += 1
            made += 1
            (method,) = rng.choices(methods, weights)
            caller.call(method, mutated(calls.of(method, rng), rng))
            if not middle and caller.tally.inputs >= inputs // 2:
                middle = process.rss
        serve()
    finally:
        caller.close()
    return Fuzzed(caller.tally, served + 1, (middle, process.rss), time.monotonic() - began)
