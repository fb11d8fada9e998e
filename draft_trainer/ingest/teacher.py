"""Checks that a sample's teacher is a distribution: p(v) = exp(y_v / T - log Z), y = W h.

y comes from the states and the policy version's lm_head, log Z from the sampled token's logit and
log-probability. A policy that makes its logits in another way than it announced, log-probabilities
at another temperature or states of another version would train without an error, on a teacher that
nobody samples from. Two things are compared on a few rows of every sample:

- the sampled tokens' logits with those that came with them,
- the mass of p with 1: over the whole vocabulary where its lm_head rows are known (the draft's
  vocabulary is the policy's, or lm_head is tied to the embeddings). Over a smaller draft vocabulary
  it can only be found to be too large.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_trainer.drafters.policy import PolicyHead, policy_logits
from slipstream.errors import RefusedError
from slipstream.sample import Sample

ROWS = 4
"""The rows of a sample that are checked. More than half of them must be off for it to be refused:
one rounding of the sampled logit moves the mass of its row."""

TOLERANCE = 0.02
"""The tolerance of a mass's logarithm, and of a logit, in addition to rounding: ``_ROUNDING`` times
the largest |y| (over T)."""

_ROUNDING = {torch.float32: 1e-4, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_SLICE = 1 << 13  # rows of lm_head at once
_CONVERTED_BYTES = 8 << 20
"""The bound on rows in another type than lm_head has, at once: larger ones leave the processor's
caches, and the allocator maps them anew each time."""


@dataclass(frozen=True)
class Mass:
    """The mass of a sample's teacher, the median over its rows, and its refusal, if any."""

    mass: float
    refusal: RefusedError | None


class TeacherCheck:
    """Checks samples against their policy versions. Thread-safe.

    Args:
        draft_vocab_ids: int [draft_vocab], ascending: the tokens of a version's lm_head rows.
    """

    def __init__(self, draft_vocab_ids: Tensor) -> None:
        self._ids = draft_vocab_ids.long().contiguous()
        self._whole: weakref.WeakKeyDictionary[PolicyHead, Tensor | None]
        self._whole = weakref.WeakKeyDictionary()

    def check(self, samples: Sequence[Sample], head: PolicyHead) -> list[Mass]:
        """Check the teachers of samples of one policy version.

        Args:
            samples: samples whose states and logits have the same types, so that one product does.
            head: their version.
        """
        rows = self.whole_lm_head(head)
        whole = None if rows is None else replace(head, lm_head_rows=rows)
        ids = self._ids if whole is None else torch.arange(len(head.embed_tokens))
        picked = [torch.from_numpy(_pick_rows(each, ids.numpy())) for each in samples]
        hidden = torch.cat(
            [each.final_hidden[at - 1] for each, at in zip(samples, picked, strict=True)]
        )
        sizes = [len(at) for at in picked]
        temperature = torch.tensor(
            [each.temperature for each, n in zip(samples, sizes, strict=True) for _ in range(n)],
            dtype=torch.float32,
        )
        tokens = _gather(samples, picked, "token_ids").long()
        sent = _gather(samples, picked, "sampled_logits")
        log_z = sent / temperature - _gather(samples, picked, "sampled_logprobs")
        log_mass, found, largest = _log_sums(
            hidden, whole or head, ids, tokens, samples[0].logits_dtype, temperature
        )
        log_mass -= log_z
        parts = zip(*(x.split(sizes) for x in (log_mass, found, sent, largest)), strict=True)
        return [
            _judge(each, *part, partial=whole is None)
            for each, part in zip(samples, parts, strict=True)
        ]

    def whole_lm_head(self, head: PolicyHead) -> Tensor | None:
        """Return the lm_head rows of every token, [vocab, H]; None where they are not known."""
        if head not in self._whole:
            rows, embeddings = head.lm_head_rows, head.embed_tokens
            whole = rows if len(rows) == len(embeddings) else None
            if whole is None and head.lm_head_bias is None and rows.dtype == embeddings.dtype:
                whole = embeddings if torch.equal(embeddings[self._ids], rows) else None
            self._whole[head] = whole
        return self._whole[head]


def _pick_rows(sample: Sample, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pick [n <= ROWS] completion tokens with a known logit, spread over the sample."""
    segments, tokens = sample.segment_ids.numpy(), sample.token_ids.numpy()
    valid = sample.loss_mask.numpy() & np.append(False, segments[1:] == segments[:-1])
    known = valid & _find(ids, tokens)[1]
    at = np.flatnonzero(known if known.any() else valid)
    return at[np.linspace(0, len(at) - 1, min(ROWS, len(at))).round().astype(np.int64)]


def _find(
    ids: NDArray[np.int64], tokens: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the tokens' indices in ascending ids, and whether they are there."""
    column = np.searchsorted(ids, tokens).clip(max=len(ids) - 1)
    return column, ids[column] == tokens


def _gather(samples: Sequence[Sample], picked: Sequence[Tensor], name: str) -> Tensor:
    return torch.cat([getattr(each, name)[at] for each, at in zip(samples, picked, strict=True)])


def _log_sums(
    hidden: Tensor,
    head: PolicyHead,
    ids: Tensor,
    tokens: Tensor,
    dtype: torch.dtype,
    temperature: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return N rows' log(sum(exp(y / T))), y of the sampled token (NaN: unknown) and max |y|."""
    count = len(hidden)
    log_sum = torch.full((count,), -torch.inf, dtype=torch.float32)
    found = torch.full((count,), torch.nan, dtype=torch.float32)
    largest = torch.zeros(count, dtype=torch.float32)
    column, known = map(torch.from_numpy, _find(ids.numpy(), tokens.numpy()))
    size, rows = _SLICE, head.lm_head_rows
    if rows.dtype != dtype:
        size = max(1, min(size, _CONVERTED_BYTES // (rows.shape[1] * dtype.itemsize)))
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        bias = None if head.lm_head_bias is None else head.lm_head_bias[part]
        piece = replace(head, lm_head_rows=rows[part], lm_head_bias=bias)
        logits = policy_logits(hidden, piece, dtype).float()
        log_sum = torch.logaddexp(log_sum, (logits / temperature[:, None]).logsumexp(1))
        largest = torch.maximum(largest, logits.abs().amax(1))
        here = (known & (column >= start) & (column < start + size)).nonzero().flatten()
        found[here] = logits[here, column[here] - start]
    return log_sum, found, largest


def _judge(
    sample: Sample,
    log_mass: Tensor,
    found: Tensor,
    sent: Tensor,
    largest: Tensor,
    *,
    partial: bool,
) -> Mass:
    # The relative rounding of the coarsest type that its logits depend on.
    coarsest = max(_ROUNDING[sample.layout.dtype], _ROUNDING[sample.logits_dtype])
    rounding = coarsest * float(largest.median())
    error = (found - sent).abs().nanmedian()
    off = log_mass.clamp(min=0.0) if partial else log_mass.abs()
    mass = float(log_mass.median().exp())
    refusal = None
    if float(error) > TOLERANCE + rounding:
        refusal = RefusedError(
            "teacher.logits",
            f"sampled_logits that differ by {float(error):.3g} (median of {len(sent)} tokens) from "
            "the product of states and lm_head",
            f"at most {TOLERANCE + rounding:.3g}",
            f"look for {_likely_cause(found, sent)} in policy version {sample.policy_version}",
        )
    # "not <=" and not ">", so that a NaN is refused.
    elif not float(off.median()) <= TOLERANCE + rounding / sample.temperature:
        over = "the draft vocabulary" if partial else "the vocabulary"
        refusal = RefusedError(
            "teacher.mass",
            f"a mass of {mass:.4g} over {over}",
            f"1 within {100 * (TOLERANCE + rounding / sample.temperature):.1f} %"
            + (", or less" if partial else ""),
            "send log-probabilities of the whole softmax of the policy's logits at the sample's "
            f"temperature ({sample.temperature:g}), before top_p, top_k and penalties",
        )
    return Mass(mass, refusal)


def _likely_cause(found: Tensor, sent: Tensor) -> str:
    """Return in words what would turn ``found`` into ``sent``; [n], NaN where not known."""
    known = found.isfinite()
    ratio, gap = sent[known] / found[known], (sent - found)[known]
    factor = float(ratio.median())
    if len(ratio) > 1 and float((ratio / factor - 1).abs().max()) < 0.05:
        return f"a factor of {factor:.3g} on the logits that OpenRun did not announce"
    # A cap takes the more of a logit, the larger it is.
    by_size = ratio[found[known].abs().argsort()]
    if len(ratio) > 1 and bool(((by_size > 0) & (by_size < 1)).all() & (by_size.diff() < 0).all()):
        return "a soft cap on the logits that OpenRun did not announce"
    if float((gap - gap.median()).abs().max()) < 0.5 * float(gap.abs().median()):
        return "an lm_head bias that OpenRun did not announce"
    return "another version's lm_head, an lm_head bias, or states that are not lm_head's input"
