"""Generation speed of the arms against no speculation, interleaved, at small batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from examples.arithmetic_grpo.records import OFF
from examples.arithmetic_grpo.rollouts import RolloutClient
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids

BATCHES = (1, 8)


def measure_speed(
    rollouts: RolloutClient,
    versions: Mapping[str, int | None],
    *,
    rounds: int = 5,
    requests_per_round: int = 8,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    """Tokens per second of each arm at each batch size, and tokens of a sequence's step.

    Every round runs all arms, the order turning by one each time, so that a drift of the
    machine's speed falls on all of them alike.

    Args:
        rollouts: the server, with nothing else to do.
        versions: by arm the release that drafts, None where no release does; without speculation
            is an arm of every comparison.
        rounds: interleaved rounds.
        requests_per_round: requests of each arm, batch size and round, at least the batch size.
        progress: told what is being measured.

    Returns:
        Batch size (as text) -> arm -> tokens/s of each round; and by arm the tokens of a sequence
        in an engine step, generated / (generated - accepted), over all rounds.
    """
    arms = [*versions, OFF]
    prompts = [prompt_ids(problem) for problem in held_out_problems(16)]
    totals = {arm: [0, 0] for arm in arms}
    figures: dict[str, dict[str, list[float]]] = {
        str(batch): {arm: [] for arm in arms} for batch in BATCHES
    }
    for batch in BATCHES:
        for index in range(rounds):
            turn = index % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                progress(f"speed: batch {batch}, round {index + 1}/{rounds}, {arm}")
                rollouts.server.speculate(arm != OFF)
                version = versions.get(arm)
                if version is not None:
                    rollouts.swap(version)
                tokens, seconds = 0, 0.0
                for start in range(0, max(requests_per_round, batch), batch):
                    chosen = [prompts[(start + k) % len(prompts)] for k in range(batch)]
                    generation, _ = rollouts.generate(chosen, 1)
                    tokens += generation.tokens
                    seconds += generation.seconds
                    totals[arm][0] += generation.tokens
                    totals[arm][1] += generation.counters.accepted
                figures[str(batch)][arm].append(tokens / seconds)
    per_step = {arm: tokens / (tokens - accepted) for arm, (tokens, accepted) in totals.items()}
    return figures, per_step
