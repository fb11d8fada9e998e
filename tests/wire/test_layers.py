"""Layer numbers: one meaning inside, every other one only at the edge."""

from __future__ import annotations

import pytest

from slipstream.errors import RefusedError
from slipstream.layers import (
    check_layers,
    choose_aux_layers,
    default_aux_layers,
)


def test_default_aux_layers_are_vllms() -> None:
    assert default_aux_layers(8) == (2, 4, 5)
    assert default_aux_layers(10) == (2, 5, 7)
    assert default_aux_layers(36) == (2, 18, 33)
    with pytest.raises(RefusedError, match="num_hidden_layers"):
        default_aux_layers(7)


@pytest.mark.parametrize("layers", range(1, 12))
def test_choose_aux_layers_for_policy_of_any_depth(layers: int) -> None:
    chosen = choose_aux_layers(layers)
    assert len(chosen) == min(layers, 3)
    assert list(chosen) == sorted(set(chosen)) and 0 <= chosen[0] <= chosen[-1] < layers
    if layers >= 8:
        assert chosen == default_aux_layers(layers)


@pytest.mark.parametrize("ids", [None, [], "12", [1.0], [True, 2], [2, 2], [3, 2], [0, 2], [2, 6]])
def test_check_layers_refuses_other_lists(ids: object) -> None:
    assert check_layers([1, 5], "ids", "fix it", 1, 5) == check_layers((1, 5), "ids", "fix it")
    with pytest.raises(RefusedError, match="expected ascending layers from 1 to 5"):
        check_layers(ids, "ids", "fix it", 1, 5)
