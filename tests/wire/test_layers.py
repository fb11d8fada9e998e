"""Layer numbers: one meaning inside, every other one only at the edge."""

from __future__ import annotations

import pytest

from slipstream.errors import RefusedError
from slipstream.layers import decode_layers, default_aux_layers, encode_layers
from slipstream.v1 import tensor_pb2


def test_vllms_defaults() -> None:
    assert default_aux_layers(8) == (2, 4, 5)
    assert default_aux_layers(10) == (2, 5, 7)
    assert default_aux_layers(36) == (2, 18, 33)
    with pytest.raises(RefusedError, match="num_hidden_layers"):
        default_aux_layers(7)


def test_round_trip_and_the_other_convention() -> None:
    assert decode_layers(encode_layers((0, 2, 5)), "aux") == (0, 2, 5)
    output = tensor_pb2.LAYER_ID_CONVENTION_LAYER_OUTPUT
    message = tensor_pb2.AuxLayers(ids=[1, 17, 32], convention=output)
    assert decode_layers(message, "aux") == default_aux_layers(36)


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 2]])
def test_bad_numbers_are_refused(ids: list[int]) -> None:
    with pytest.raises(RefusedError, match=r"aux\.ids"):
        decode_layers(encode_layers(ids), "aux")


@pytest.mark.parametrize("convention", [0, 9])
def test_no_convention_is_refused(convention: int) -> None:
    message = tensor_pb2.AuxLayers(ids=[1, 2])
    message.convention = convention  # type: ignore[assignment]
    with pytest.raises(RefusedError, match=r"aux\.convention"):
        decode_layers(message, "aux")
