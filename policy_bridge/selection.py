"""Chooses the sequences to send, before any hidden state leaves the device.

Also reads what a caller says of a batch of B rows and S columns: padded, packed, or both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from slipstream.errors import RefusedError

CONTEXT_SHARE = 4
"""A later window's first 1 / so much repeats the one before, so that its first targets have a past:
512 of 2,048 tokens. A sequence then takes at most a third more bytes; of half a window, twice as
many."""


@dataclass(frozen=True)
class Span:
    """One sequence: a row's columns from ``start`` up to, not including, ``end``."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Candidate:
    """A sequence, or one window of it, that could be shipped.

    Attributes:
        row: its row in that batch.
        start: first column, padding excluded.
        end: column after the last.
        offset: position of ``start`` in its sequence; 0 unless it is a later window.
        fresh: columns from here on are not in an earlier window; >= ``start``.
        nbytes: what shipping it costs.
        lot: uniform in [0, 1), drawn once: the random order of a window's candidates, the same
            in every call.
    """

    row: int
    start: int
    end: int
    offset: int
    fresh: int
    nbytes: int
    lot: float = 0.0

    @property
    def tokens(self) -> int:
        """Its length in tokens."""
        return self.end - self.start


@dataclass(eq=False)
class Spent:
    """The bytes and samples that the windows of one policy version have chosen.

    Changed only where choosing is done.

    Attributes:
        first_bytes: bound on a first sample that is chosen although the budget leaves it out.
    """

    first_bytes: int = 0
    nbytes: int = 0
    samples: int = 0

    def choose(
        self, candidates: Iterable[Candidate], budget_bytes: int, passes_left: int = 1
    ) -> list[Candidate]:
        """Choose what is sent of a pass, see ``choose``: a share of what is left of the budget.

        At least one sample of a version, within ``first_bytes``. A trainer says in its answers how
        many tokens it wants: a client that sends nothing would not hear when it wants more.
        """
        pool = [*candidates]
        chosen = choose(pool, (budget_bytes - self.nbytes) // passes_left)
        if chosen or self.samples or passes_left > 1:
            return chosen
        return choose(pool, self.first_bytes)[:1]

    def add(self, chosen: Sequence[Candidate]) -> None:
        """Count what was chosen."""
        # In this order a thread that reads between the two sees less spent, not more.
        self.samples += len(chosen)
        self.nbytes += sum(candidate.nbytes for candidate in chosen)


def choose(candidates: Iterable[Candidate], budget_bytes: int) -> list[Candidate]:
    """Choose what is sent: candidates in the order of their lots, for as long as they fit.

    One that no longer fits is passed over and smaller ones still get their chance, so the budget is
    filled and short sequences are slightly preferred. When the outbox must shed, the last of them
    go first. In a window whose passes outgrow ``device_bytes`` this is called several times, with
    what it chose of the passes before among the candidates: because their order is fixed, that is
    the same as one choice over all passes at once.
    """
    chosen, left = [], budget_bytes
    for candidate in sorted(candidates, key=lambda one: one.lot):
        if candidate.nbytes <= left:
            chosen.append(candidate)
            left -= candidate.nbytes
    return chosen


def bytes_per_token(layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of one token on the wire: states of ``layers`` auxiliary layers and the final one,
    five 4-byte numbers (id, position, segment, log-prob, logit) and a mask byte; a block's few
    bytes of padding are not counted."""
    return (layers + 1) * hidden_size * dtype.itemsize + 5 * 4 + 1


def windows(
    *,
    row: int,
    start: int,
    loss_mask: Sequence[bool] | NDArray[np.bool_],
    token_bytes: int,
    max_tokens: int,
    draw: Callable[[], float] = lambda: 0.0,
) -> list[Candidate]:
    """Cut one sequence, from column ``start`` on, into candidates of at most ``max_tokens`` tokens.

    Each window repeats the tail of the one before as context that is not trained on again. Windows
    with nothing to train on are left out. ``draw`` gives each its lot.
    """
    length = len(loss_mask)
    context = max_tokens // CONTEXT_SHARE
    found, fresh = [], 0
    while fresh < length:
        begin = max(0, fresh - context)
        end = min(length, begin + max_tokens)
        # A draft's first anchor is token 0 and predicts token 2: none sooner is a target.
        if np.any(loss_mask[max(fresh, begin + 2) : end]):
            found.append(
                Candidate(
                    row=row,
                    start=start + begin,
                    end=start + end,
                    offset=begin,
                    fresh=start + fresh,
                    nbytes=(end - begin) * token_bytes,
                    lot=draw(),
                )
            )
        fresh = end
    return found


def aligned(name: str, values: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Values [B, S], detached, a missing first column padded with 0.

    Raises RefusedError: they have another shape.
    """
    if values is None:
        return None
    found = shape_of(values)
    if found == [shape[0], shape[1] - 1]:
        return F.pad(values.detach(), (1, 0))
    if found != [*shape]:
        expected = f"a tensor {list(shape)} (or without the first column)"
        raise RefusedError(name, found, expected, "align it with input_ids")
    return values.detach()


def spans_of(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    shape: tuple[int, ...],
) -> list[Span]:
    """Every sequence of a batch, row by row.

    Args:
        attention_mask: [B, S], true (or > 0) on real tokens; None: all are.
        position_ids: [B, S] of a packed batch: where they begin again at 0, so does a
            sequence. None: one sequence a row.
        shape: (B, S).

    Raises:
        RefusedError: a row with gaps, or positions that neither go on nor begin again.
    """
    if attention_mask is None and position_ids is None:
        return [Span(row, 0, shape[1]) for row in range(shape[0]) if shape[1]]
    # With numpy: these are many operations on few numbers.
    if attention_mask is None:
        real = np.ones(shape, dtype=np.bool_)
    else:
        real = attention_mask.detach().bool().cpu().numpy()
    begins = real.copy()
    begins[:, 1:] &= ~real[:, :-1]
    if position_ids is None:
        if (begins.sum(1) > 1).any():
            found, expected = "a row with gaps", "left or right padding"
            raise RefusedError("attention_mask", found, expected, "pad at one end")
    else:
        positions = position_ids.detach().long().cpu().numpy()
        goes_on = np.zeros(shape, dtype=np.bool_)
        goes_on[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
        begins |= real & ~goes_on
        if positions[begins].any():
            found = f"a sequence that begins at {int(positions[begins].max())}"
            expected = "0 where a sequence begins, else one more than the token before"
            raise RefusedError("position_ids", found, expected, "pass those of the forward pass")
    # A sequence ends where the next token is padding or begins another one.
    ends = real.copy()
    ends[:, :-1] &= (begins | ~real)[:, 1:]
    starts = np.argwhere(begins).tolist()
    stops = np.nonzero(ends)[1].tolist()
    return [Span(row, start, stop + 1) for (row, start), stop in zip(starts, stops, strict=True)]


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a call of a policy's decoder that say which tokens belong together.

    Attributes:
        ids: whole numbers [B, S], if it was token ids.
        follows: bool [B or 1, S - 1] by the input that says it (attention_mask, position_ids):
            whether a token goes on with the sequence of the one before it.
        begins: [N], where sequences begin in all B * S tokens, for varlen attention.
        attention: transformers' name of the attention; empty for a model of another library.
        cached: the layers had a cache, with which transformers separates nothing by positions.
        continues: there were tokens in it before the pass.
        unread: something else may have separated sequences.
    """

    ids: torch.Tensor | None = None
    follows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    begins: torch.Tensor | None = None
    attention: str = ""
    cached: bool = False
    continues: bool = False
    unread: bool = True

    def on_host(self) -> PassInputs:
        """The same in host memory, ids as int32."""
        return replace(
            self,
            ids=None if self.ids is None else self.ids.to("cpu", torch.int32),
            follows={name: follows.cpu() for name, follows in self.follows.items()},
            begins=None if self.begins is None else self.begins.cpu(),
        )

    def check(self, spans: Iterable[Span], loss_mask: torch.Tensor) -> None:
        """Refuse sequences for which the pass computed something else than for each alone.

        Up to its last token of ``loss_mask`` (bool [B, S]), a sequence must be one in the pass,
        too, and must not go on from what is before it in its row.

        Raises:
            RefusedError: naming the input that says otherwise.
        """
        wanted, apart = loss_mask.numpy(), {}
        for name, follows in self.follows.items():
            apart[name] = np.zeros(wanted.shape, dtype=np.bool_)
            apart[name][:, 1:] = ~follows.numpy()
        if self.begins is not None:
            begins = np.isin(np.arange(wanted.size), self.begins.numpy())
            apart["cu_seqlens"] = begins.reshape(wanted.shape)
        ends = [where for name, where in apart.items() if self._ends_attention(name, len(wanted))]
        for span in spans:
            row, start = span.row, span.start
            targets = np.flatnonzero(wanted[row, start : span.end])
            if not len(targets):
                continue
            if self.continues:
                found, step = "a cache of the beginning of sequences", "run the pass without it"
                raise RefusedError("past_key_values", found, "a pass over whole sequences", step)
            for name, where in apart.items():
                breaks = np.flatnonzero(where[row, start + 1 : start + targets[-1] + 1])
                if len(breaks):
                    found = f"a pass that ends a sequence of ship at column {start + breaks[0]}"
                    expected, step = f"{name} of that pass", f"pass ship the model's {name}"
                    raise RefusedError(name, f"{found} of row {row}", expected, step)
            told = not self.unread and (self.attention or apart)
            if start and told and not any(where[row, start] for where in ends):
                raise RefusedError(
                    "position_ids",
                    f"a pass that read row {row} on through column {start}",
                    "another sequence from there on, as ship has it",
                    "give the model ship's position_ids, with varlen attention, or with "
                    "use_cache=False and no attention_mask; or the attention_mask of padded rows",
                )

    def _ends_attention(self, name: str, rows: int) -> bool:
        """Return whether no token attends beyond where ``name`` has a sequence begin.

        Of positions transformers decides it in ``masking_utils._preprocess_mask_arguments`` and
        ``modeling_flash_attention_utils._is_packed_sequence``.
        """
        if not self.attention or name == "attention_mask":
            return True
        mask = self.follows.get("attention_mask")
        if "flash" in self.attention:
            return name == "cu_seqlens" or (rows == 1 and (mask is None or bool(mask.all())))
        return name == "position_ids" and mask is None and not self.cached


def shape_of(values: object) -> object:
    """Return a tensor's sizes, or the type of what was given instead."""
    return [*values.shape] if isinstance(values, torch.Tensor) else type(values).__name__


def scores_of(
    name: str, values: torch.Tensor | Sequence[float] | None, sequences: int
) -> list[float | None]:
    """One number a sequence, in the order of ``spans_of``; None where none were given."""
    if values is None:
        return [None] * sequences
    try:
        given = values.tolist() if isinstance(values, torch.Tensor) else list(values)
        numbers = [float(number) for number in given]
        found = f"{len(numbers)} numbers, {sum(map(math.isfinite, numbers))} of them finite"
    except (TypeError, ValueError) as error:
        numbers, found = [math.nan], f"{type(values).__name__} ({error})"
    if len(numbers) != sequences or not all(map(math.isfinite, numbers)):
        expected = f"a finite number for each of the {sequences} sequences"
        step = "give one per row, or per sequence of a packed row"
        raise RefusedError(name, found, expected, step)
    return list(numbers)
