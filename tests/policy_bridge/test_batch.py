"""Padded, packed, or both: which tokens belong together."""

from __future__ import annotations

import pytest
import torch

from policy_bridge.selection import spans_of
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
