"""Tests of samples against a policy's exact distribution: a joint's chi-square, and surprise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import chi2
from transformers import DynamicCache, PreTrainedModel

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


Z_BOUND = 3.9
"""The bound of ``Surprise``: refuses the null in one run of 10,000 for each of its sums."""


@dataclass(frozen=True)
class Surprise:
    """Two sums over sampled tokens that are martingales if the policy drew each of them.

    With p the policy's distribution at a token and x the token: -log p(x) less its entropy, and
    1 if x is the likeliest token less that token's probability. Each sum over the square root of
    the sum of its variances is standard normal for many tokens, however prompts, lengths and drafts
    were chosen; so ``abs(z) > Z_BOUND`` has a false-alarm rate of 1e-4 each, 2e-4 for both.
    """

    nll: float
    argmax: float
    tokens: int

    @property
    def worst(self) -> float:
        """The greater of both in absolute value."""
        return max(abs(self.nll), abs(self.argmax))


class SurpriseSums:
    """Adds up ``Surprise`` over completions."""

    def __init__(self) -> None:
        self._sums, self._variances = torch.zeros(2, 2, dtype=torch.float64)
        self._tokens = 0

    def add(self, log_p: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tokens [N] that were drawn, and the log-distributions float64 [N, V] they had."""
        p, chosen = log_p.exp(), log_p.gather(-1, tokens[:, None]).squeeze(-1)
        entropy = -(p * log_p).sum(-1)
        best, place = p.max(-1)
        found = torch.stack([-chosen - entropy, (place == tokens).double() - best])
        spread = torch.stack([(p * log_p.square()).sum(-1) - entropy.square(), best * (1 - best)])
        self._sums += found.sum(1)
        self._variances += spread.sum(1)
        self._tokens += len(tokens)

    def result(self) -> Surprise:
        """Return the surprise of all that was added."""
        nll, argmax = (self._sums / self._variances.sqrt()).tolist()
        return Surprise(nll, argmax, self._tokens)


@torch.no_grad()
def surprise(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> Surprise:
    """z of both sums for completions at T = 1, ``completions[i]`` of ``prompts[i]``."""
    sums = SurpriseSums()
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]) + len(completions[row]))
    for start in range(0, len(order), 64):
        rows = [[*prompts[row], *completions[row]] for row in order[start : start + 64]]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        # Padding is on the right: causal attention never sees it before a real token.
        log_p = model(input_ids=ids[:, :-1]).logits.double().log_softmax(-1)
        inside = torch.zeros(ids[:, 1:].shape, dtype=torch.bool)
        for index, row in enumerate(order[start : start + 64]):
            inside[index, len(prompts[row]) - 1 : len(rows[index]) - 1] = True
        sums.add(log_p[inside], ids[:, 1:][inside])
    return sums.result()


@torch.no_grad()
def log_probs_over_versions(
    models: Sequence[PreTrainedModel],
    prompt: Sequence[int],
    completion: Sequence[int],
    starts: Sequence[int],
) -> torch.Tensor:
    """Log-distributions float64 [N, V] of a completion's N tokens, with keys and values as kept.

    ``models[i]`` samples from token ``starts[i]`` on. It computes the keys and values from the last
    token before that on, which nobody had computed; those before are of the models before.
    """
    ids = torch.tensor([[*prompt, *completion]])
    cache = DynamicCache(config=models[0].config)
    ends = [*(len(prompt) - 1 + start for start in starts[1:]), ids.shape[1] - 1]
    at, parts = 0, []
    for model, end in zip(models, ends, strict=True):
        output = model(input_ids=ids[:, at:end], past_key_values=cache, use_cache=True)
        parts.append(output.logits[0].double().log_softmax(-1))
        at = end
    return torch.cat(parts)[len(prompt) - 1 :]
