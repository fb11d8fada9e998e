"""DFlash drafts as vLLM serves them: one forward pass over a block proposes all its tokens.

Embeddings and lm_head are the verifier's modules, as those of MTP heads. What vLLM derives from the
parameters is replaced with them (``served.derived``).
"""

from __future__ import annotations

from pathlib import Path

from rollout_server.checkpoint import read_config, read_draft_layout
from rollout_server.served.served import Served, check_sizes
from slipstream.errors import RefusedError
from slipstream.layers import check_layers

ARCHITECTURE = "DFlashDraftModel"
_SIZES = ("hidden_size", "vocab_size")
_PARTS = ("fc.", "hidden_norm.", "norm.", "layers.")
_OTHER_LAYOUT = "speculators_model_type"
"""The speculators library's, whose draft has a vocabulary and names of its own."""
_NEXT = "give a DFlash draft that was trained for this model"


class Dflash(Served):
    """Names as DFlash's authors write them; nothing of a policy's checkpoint is among them."""

    name = "dflash"
    follows_policy = ("embed_tokens", "lm_head")

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        path = f"{draft_dir / 'config.json'}"
        other = read_config(draft_dir, "--draft").get(_OTHER_LAYOUT)
        if other is not None:
            raise RefusedError(f"{path}: {_OTHER_LAYOUT}", other, "nothing: DFlash's own", _NEXT)
        model, draft = check_sizes(model_dir, draft_dir, _SIZES, _NEXT)
        if draft.get("architectures") != [ARCHITECTURE]:
            found = draft.get("architectures")
            raise RefusedError(f"{path}: architectures", found, [ARCHITECTURE], _NEXT)
        block, vocab, depth = (
            draft.get("dflash_config") or {},
            int(model["vocab_size"]),
            int(model.get("num_hidden_layers") or 0),
        )
        mask = block.get("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < vocab:
            expected = f"a token of the model, 0 to {vocab - 1}"
            raise RefusedError(f"{path}: dflash_config.mask_token_id", mask, expected, _NEXT)
        field = f"{path}: dflash_config.target_layer_ids"
        layers = check_layers(block.get("target_layer_ids"), field, _NEXT, last=depth - 1)
        if (draft_dir / "mask_embedding.pt").exists():
            raise RefusedError(
                f"{draft_dir / 'mask_embedding.pt'}",
                "a pickle, which vLLM would load",
                "none: the mask is a token of the model's vocabulary",
                "leave it out; no stage could replace it",
            )
        layout = read_draft_layout(draft_dir)
        others = [name for name in layout if not name.startswith(_PARTS)]
        if others:
            raise RefusedError(
                f"{draft_dir}: tensors",
                f"{len(others)} others, such as {others[0]}",
                f"only {', '.join(f'{part}*' for part in _PARTS)}",
                "save the draft without embeddings and lm_head: they are the model's",
            )
        width, fc = len(layers) * int(model["hidden_size"]), layout.get("fc.weight")
        if fc is None or fc.shape != (draft["hidden_size"], width):
            found = "absent" if fc is None else list(fc.shape)
            expected = f"[{draft['hidden_size']}, {width}] for layers {[*layers]}"
            raise RefusedError(f"{draft_dir}: fc.weight", found, expected, _NEXT)
