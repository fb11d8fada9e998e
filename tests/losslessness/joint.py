"""Exact joint probabilities of the first tokens, and the chi-square test against samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from scipy.stats import chi2
from transformers import PreTrainedModel

MIN_EXPECTED = 10.0
"""Cells that expect fewer samples are pooled into one (Cochran's rule asks for 5)."""


@torch.no_grad()
def exact_joint(
    model: PreTrainedModel, prompt: Sequence[int], length: int, floor: float, eos: int
) -> dict[tuple[int, ...], float]:
    """p(x_1 .. x_length | prompt) at T = 1 of every continuation that is likelier than ``floor``.

    A continuation that reaches ``eos`` ends there. What is missing from a total of 1 is the mass
    of the continuations below ``floor``.
    """
    done: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        rows = torch.tensor([[*prompt, *prefix] for prefix in open_])
        log_p = torch.cat(
            [
                model(input_ids=part).logits[:, -1].double().log_softmax(-1)
                for part in rows.split(256)
            ]
        )
        longer: dict[tuple[int, ...], float] = {}
        for (prefix, mass), row in zip(open_.items(), log_p.exp(), strict=True):
            for token in torch.nonzero(row * mass > floor).flatten().tolist():
                target = done if token == eos else longer
                target[(*prefix, token)] = mass * float(row[token])
        open_ = longer
    return {**done, **open_}


def chi_square_p_value(
    samples: Sequence[tuple[int, ...]], exact: dict[tuple[int, ...], float]
) -> float:
    """P-value of the samples under the exact joint; unlikely continuations are one cell."""
    total = len(samples)
    counts = Counter(samples)
    cells = {key: p * total for key, p in exact.items() if p * total >= MIN_EXPECTED}
    rest_expected = total - sum(cells.values())
    rest_counted = total - sum(counts[key] for key in cells)
    statistic = sum((counts[key] - expected) ** 2 / expected for key, expected in cells.items())
    degrees = len(cells) - 1
    if rest_expected > 1e-6 * total:
        statistic += (rest_counted - rest_expected) ** 2 / rest_expected
        degrees += 1
    elif rest_counted:
        return 0.0  # samples where the distribution has nothing
    return float(chi2.sf(statistic, degrees))
