"""Generation speed of the arms against no speculation, interleaved, at small batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from examples.arithmetic_grpo.records import ADAPTED, FROZEN, OFF
from examples.arithmetic_grpo.rollouts import RolloutClient

BATCHES = (1, 8)


def measure_speed(
    rollouts: RolloutClient,
    prompts: Sequence[Sequence[int]],
    adapted_version: int,
    *,
    rounds: int = 5,
    requests_per_round: int = 8,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of each arm at each batch size.

    Every round runs all arms, the order turning by one each time, so that a drift of the
    machine's speed falls on all of them alike.

    Args:
        rollouts: the server, with nothing else to do.
        prompts: token ids; taken in turn.
        adapted_version: the release of the adapted arm.
        rounds: interleaved rounds.
        requests_per_round: requests of each arm, batch size and round, at least the batch size.
        progress: told what is being measured.

    Returns:
        Batch size (as text) -> arm -> tokens/s of each round.
    """
    arms = [ADAPTED, FROZEN, OFF]
    figures: dict[str, dict[str, list[float]]] = {
        str(batch): {arm: [] for arm in arms} for batch in BATCHES
    }
    for batch in BATCHES:
        for index in range(rounds):
            turn = index % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                progress(f"speed: batch {batch}, round {index + 1}/{rounds}, {arm}")
                rollouts.set_speculation(arm != OFF)
                if arm != OFF:
                    rollouts.swap(0 if arm == FROZEN else adapted_version)
                tokens, seconds = 0, 0.0
                for start in range(0, max(requests_per_round, batch), batch):
                    chosen = [prompts[(start + k) % len(prompts)] for k in range(batch)]
                    generation, _ = rollouts.generate(chosen, 1)
                    tokens += generation.tokens
                    seconds += generation.seconds
                figures[str(batch)][arm].append(tokens / seconds)
    rollouts.set_speculation(True)
    rollouts.swap(adapted_version)
    return figures
