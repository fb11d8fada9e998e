"""Auxiliary layer numbers and their convention.

Inside Slipstream and on its wire a layer number L always means "after L decoder
layers" (0 = embeddings), which is vLLM's reading and the index into Hugging Face's
``hidden_states``, but for the last: there it is normed, here it is the input of the final norm.
Every layer of a policy can be captured. Other conventions exist only at the edge.
"""

from __future__ import annotations

from itertools import pairwise

from slipstream.errors import RefusedError

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""The top-level key of a draft's config.json for its auxiliary layers."""


def default_aux_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """vLLM's default for EAGLE-3: after layers 2, n // 2 and n - 3.

    Source: vLLM ``get_eagle3_default_aux_hidden_state_layers``.

    Raises:
        RefusedError: fewer than 8 layers, where the three collapse into two.
    """
    if num_hidden_layers < 8:
        raise RefusedError(
            "num_hidden_layers",
            num_hidden_layers,
            "at least 8 for the default auxiliary layers",
            "set eagle_aux_hidden_state_layer_ids in the draft's config.json; a draft of "
            "draft-trainer init has them",
        )
    return (2, num_hidden_layers // 2, num_hidden_layers - 3)


def choose_aux_layers(num_hidden_layers: int) -> tuple[int, ...]:
    """Auxiliary layers of a new draft: vLLM's default, and for shallower policies an early, a
    middle and a late layer, or every layer but the last where there are fewer than four.
    """
    if num_hidden_layers >= 8:
        return default_aux_layers(num_hidden_layers)
    if num_hidden_layers < 4:
        return tuple(range(num_hidden_layers))
    return (1, num_hidden_layers // 2, max(num_hidden_layers // 2 + 1, num_hidden_layers - 2))


def check_layers(
    ids: object, field: str, next_step: str, first: int = 0, last: int | None = None
) -> tuple[int, ...]:
    """Check layer numbers from a file or an option, in whatever convention it has.

    Args:
        ids: should be a list of at least one.
        field: named in a refusal.
        next_step: of a refusal.
        first: the lowest that there is.
        last: the highest; None where it is not known.

    Raises:
        RefusedError: none, not whole numbers, not strictly ascending, or outside these bounds.
    """
    found = [*ids] if isinstance(ids, list | tuple) else []
    whole = bool(found) and all(type(one) is int for one in found)
    if (
        not whole
        or any(one >= other for one, other in pairwise(found))
        or found[0] < first
        or (last is not None and found[-1] > last)
    ):
        bounds = f"from {first}" if last is None else f"from {first} to {last}"
        raise RefusedError(field, found or ids, f"ascending layers {bounds}", next_step)
    return tuple(found)


def ambiguous_layers(where: str, nested: object) -> RefusedError:
    """The refusal of layers in ``eagle_config`` alone, where nothing says what they mean.

    Frameworks that write them there count the outputs of layers from 0. vLLM's V1 runner reads them
    as "after L layers", and its V2 runner does not read them. One layer off, a draft is trained and
    served without an error, and less is accepted.

    Args:
        where: the config.json, as a refusal names it.
        nested: what was found.
    """
    return RefusedError(
        f"{where} eagle_config.{AUX_LAYERS}",
        nested,
        f"{AUX_LAYERS} at top level, L meaning after L decoder layers",
        "move it there: add 1 to each where 0 means the output of the first layer; "
        "`draft-trainer releases import` does it where the policy's depth says what they mean",
    )
