"""Padded, packed, or both: which tokens belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from policy_bridge.selection import PassInputs, Span, spans_of
from slipstream.errors import RefusedError
from tests.tiny import tiny_qwen3

from .conftest import batch
from .windows import LAYERS, Windows


def spans(mask: list[list[int]] | None, positions: list[list[int]] | None) -> list[tuple[int, ...]]:
    shape = (len(mask or positions or []), len((mask or positions or [[]])[0]))
    found = spans_of(
        None if mask is None else torch.tensor(mask),
        None if positions is None else torch.tensor(positions),
        shape,
    )
    return [(span.row, span.start, span.end) for span in found]


def test_spans_skip_padding_at_either_end() -> None:
    assert spans([[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]], None) == [
        (0, 0, 2),
        (1, 1, 3),
        (3, 0, 3),
    ]
    assert spans_of(None, None, (2, 3))[1].end == 3


def test_spans_begin_where_positions_restart() -> None:
    assert spans(None, [[0, 1, 2, 0, 1, 0, 1]]) == [(0, 0, 3), (0, 3, 5), (0, 5, 7)]
    assert spans([[1, 1, 1, 1, 1, 0]], [[0, 0, 1, 0, 1, 2]]) == [(0, 0, 1), (0, 1, 3), (0, 3, 5)]
    # Left padding as Hugging Face numbers it.
    assert spans([[0, 0, 1, 1]], [[1, 1, 0, 1]]) == [(0, 2, 4)]


@pytest.mark.parametrize(
    ("mask", "positions", "field"),
    [
        ([[1, 0, 1]], None, "attention_mask"),
        (None, [[0, 1, 3]], "position_ids"),
        (None, [[2, 3, 4]], "position_ids"),
        ([[1, 0, 1]], [[0, 1, 2]], "position_ids"),
    ],
)
def test_spans_mask_or_positions_with_gaps_refused(
    mask: list[list[int]] | None, positions: list[list[int]] | None, field: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        spans(mask, positions)
    assert refused.value.field == field


def test_packed_batch_is_captured_per_sequence() -> None:
    """Packed into one row, each sequence gets the states it has alone, and its own positions."""
    lengths = (9, 5, 12)
    data, model = batch(lengths), tiny_qwen3().eval()
    rows = [data["input_ids"][row, :length] for row, length in enumerate(lengths)]
    packed = {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    loss = torch.cat([data["loss_mask"][row, :n] for row, n in enumerate(lengths)])[None]
    together, alone = Windows(model), Windows(model)
    with torch.no_grad():
        with together.open() as capture:
            model(**packed, use_cache=False)
            capture.ship(**packed, loss_mask=loss, prompt_lengths=[3, 2, 4])
        for row, ids in enumerate(rows):
            with alone.open() as capture:
                model(ids[None], use_cache=False)
                capture.ship(ids[None], loss_mask=data["loss_mask"][row : row + 1, : len(ids)])
    assert len(together.samples) == 3
    for row, length in enumerate(lengths):
        sample, own = together.of_row(data, row), alone.of_row(data, row)
        assert sample.positions.tolist() == list(range(length))
        assert torch.equal(sample.loss_mask, own.loss_mask)
        assert sample.aux.shape == (length, 16 * len(LAYERS))
        for name in ("aux", "final_hidden", "sampled_logits"):
            close = torch.testing.assert_close
            close(getattr(sample, name), getattr(own, name), atol=1e-5, rtol=1e-5)
        assert sample.sampled_logprobs[0] == 0.0
        torch.testing.assert_close(sample.sampled_logprobs, own.sampled_logprobs)


@pytest.mark.parametrize("how", ["mask without its name", "static cache that was reset"])
def test_right_pass_is_captured(how: str) -> None:
    model = tiny_qwen3().eval()
    static = how.startswith("static")
    data = batch((12, 12)) if static else batch((9, 5, 12), "left")
    windows = Windows(model)
    with torch.no_grad(), windows.open() as capture:
        if static:
            cache = StaticCache(config=model.config, max_cache_len=16)
            model(data["input_ids"], past_key_values=cache)
            cache.reset()
            model(data["input_ids"], past_key_values=cache)
        else:
            model.lm_head(model.model(data["input_ids"], data["attention_mask"])[0])
        capture.ship(**data)
    assert len(windows.samples) == len(data["input_ids"])


LENGTHS = (9, 5, 12)
RESTARTED = torch.cat([torch.arange(length) for length in LENGTHS])[None]
SECTIONS = torch.cat([torch.full((length,), row) for row, length in enumerate(LENGTHS)])
IN_SECTIONS = (SECTIONS[:, None] == SECTIONS).tril()[None, None]
ONE_CAUSAL = torch.ones(26, 26, dtype=torch.bool).tril()[None, None]
ONES = torch.ones(1, 26, dtype=torch.long)
NO_CACHE = {"use_cache": False}

# What the pass gets, what ship says of it, and the field that is refused, if any.
PACKED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "restarted": ({"position_ids": RESTARTED, **NO_CACHE}, {"position_ids": RESTARTED}, ""),
    "own mask": ({"attention_mask": IN_SECTIONS}, {"position_ids": RESTARTED}, ""),
    "one long sequence": ({}, {"position_ids": RESTARTED}, "position_ids"),
    "long positions": (
        {"position_ids": torch.arange(26)[None]},
        {"position_ids": RESTARTED},
        "position_ids",
    ),
    # transformers looks for sequences in positions only without a cache and without a mask.
    "cache": ({"position_ids": RESTARTED}, {"position_ids": RESTARTED}, "position_ids"),
    "mask of ones": (
        {"position_ids": RESTARTED, "attention_mask": ONES, **NO_CACHE},
        {"position_ids": RESTARTED},
        "position_ids",
    ),
    "own mask of one": (
        {"position_ids": RESTARTED, "attention_mask": ONE_CAUSAL},
        {"position_ids": RESTARTED},
        "position_ids",
    ),
    "not said to ship": ({"position_ids": RESTARTED, **NO_CACHE}, {}, "position_ids"),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("layers", [LAYERS, (0,), ()], ids=["late", "first", "none"])
def test_packed_pass_of_other_sequences_is_refused(name: str, layers: tuple[int, ...]) -> None:
    """Refused exactly where states of ship's sequences differ from those of each alone."""
    given, said, field = PACKED[name]
    model, told = tiny_qwen3().eval(), list[RefusedError]()
    ids = batch((26,))["input_ids"]
    with torch.no_grad():
        ran = model(ids, **given, output_hidden_states=True).hidden_states[2][0]
        ends = torch.tensor(LENGTHS).cumsum(0).tolist() if said else [26]
        parts = [ids[:, start:end] for start, end in zip([0, *ends], ends, strict=False)]
        alone = [model(part, output_hidden_states=True).hidden_states[2][0] for part in parts]
        windows = Windows(model, layers)
        with windows.open(refuse=told.append) as capture:
            model(ids, **given)
            capture.ship(ids, loss_mask=RESTARTED >= 3, **said)
    apart = float((ran - torch.cat(alone)).norm() / ran.norm())
    assert (apart > 0.05) == bool(field) and (apart < 1e-5) == (not field)
    assert [error.field for error in told] == [field] * bool(field)
    assert len(windows.samples) == (0 if field else 3)


@pytest.mark.parametrize(
    ("side", "in_pass", "in_ship", "field"),
    [
        ("left", True, True, ""),
        ("left", True, False, "attention_mask"),
        ("left", False, True, "position_ids"),
        ("left", False, False, ""),
        # What comes after the last target changes no state before it.
        ("right", True, False, ""),
        ("right", False, True, ""),
    ],
)
def test_padding_of_pass_and_ship_is_compared(
    side: str, in_pass: bool, in_ship: bool, field: str
) -> None:
    model, data, told = tiny_qwen3().eval(), batch((9, 5, 12), side), list[RefusedError]()
    mask = {"attention_mask": data.pop("attention_mask")}
    windows = Windows(model)
    with torch.no_grad(), windows.open(refuse=told.append) as capture:
        model(data["input_ids"], **(mask if in_pass else {}))
        capture.ship(**data, **(mask if in_ship else {}))
    assert [error.field for error in told] == [field] * bool(field)
    assert len(windows.samples) == (0 if field else 3)


def test_pass_on_a_cache_of_the_beginning_is_refused() -> None:
    """One on an empty cache is not."""
    model, told, ids = tiny_qwen3().eval(), list[RefusedError](), batch((12,))["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :4]).past_key_values
        windows = Windows(model)
        with windows.open(refuse=told.append) as capture:
            model(ids[:, 4:], past_key_values=cache)
            capture.ship(ids[:, 4:], loss_mask=torch.ones(1, 8, dtype=torch.bool))
        with Windows(model).open(refuse=told.append) as capture:
            model(ids, past_key_values=DynamicCache(config=model.config))
            capture.ship(ids, loss_mask=torch.ones(1, 12, dtype=torch.bool))
    assert [(error.field, error.found) for error in told] == [
        ("past_key_values", "a cache of the beginning of sequences")
    ]
    assert not windows.samples


def refused_of(spans: list[Span], **inputs: Any) -> str:
    """The field that is refused of spans in rows of six tokens, all of them targets; or ""."""
    rows = 1 + max(span.row for span in spans)
    try:
        PassInputs(unread=False, **inputs).check(spans, torch.ones(rows, 6, dtype=torch.bool))
    except RefusedError as error:
        return error.field
    return ""


def test_varlen_attention_is_read_as_transformers_does() -> None:
    two = [Span(0, 0, 4), Span(0, 4, 6)]
    restarted = {"position_ids": torch.tensor([[True, True, True, False, True]])}
    flash, begins = {"attention": "flash_attention_2"}, torch.tensor([0, 4, 6])
    assert refused_of(two, begins=begins, **flash) == ""
    assert refused_of(two, begins=torch.tensor([0, 3, 6]), **flash) == "cu_seqlens"
    assert refused_of([Span(0, 0, 6)], begins=begins, **flash) == "cu_seqlens"
    # A fused kernel of torch knows no such boundaries.
    assert refused_of(two, begins=begins, attention="sdpa") == "position_ids"
    # Positions count for one row without padding, with a cache too.
    assert refused_of(two, follows=restarted, cached=True, **flash) == ""
    rows = [*two, Span(1, 0, 6)]
    later = {"position_ids": torch.cat([restarted["position_ids"], torch.ones(1, 5).bool()])}
    assert refused_of(rows, follows=later, **flash) == "position_ids"
    whole = {"attention_mask": torch.ones(1, 5, dtype=torch.bool)}
    padded = {"attention_mask": torch.tensor([[True, True, True, True, False]])}
    assert refused_of(two, follows=restarted | whole, **flash) == ""
    assert refused_of([*two[:1], Span(0, 4, 5)], follows=restarted | padded, **flash) == (
        "position_ids"
    )
    # Of another library's model it is only known what was said.
    assert refused_of(two) == refused_of(two, follows=restarted) == ""
    assert refused_of(two, begins=torch.tensor([0, 6])) == "position_ids"
