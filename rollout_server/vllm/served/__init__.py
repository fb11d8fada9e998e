"""Draft mechanisms on the server's side: vLLM's settings, and what a stage may replace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_server.control.draft_folder import read_config, read_manifest
from rollout_server.vllm.served.kinds import SPECULATORS, Dflash, DraftModel, Dspark, Eagle3, Mtp
from rollout_server.vllm.served.served import Served, WithoutWeights
from slipstream.checkpoints import read_layout
from slipstream.errors import RefusedError

SERVED: dict[str, Served] = {
    served.name: served
    for served in (
        Eagle3(),
        Mtp(),
        DraftModel(),
        Dflash(),
        Dspark(),
        WithoutWeights("ngram", {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        WithoutWeights("none", None),
    )
}
"""The mechanisms by ``--draft-kind``."""

_NOT_SWAPPED = re.compile("dflash|dspark|eagle(?!3)")
"""A pattern in names of architectures that vLLM loads and a swap would tear, or that nothing here
trains; docs/mechanisms.md gives the reason for each."""

_FIRST_LAYER = {
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
}


def served_by(kind: str | None, draft_dir: Path | None) -> Served:
    """The mechanism that was asked for, or that the draft's manifest or tensors say.

    Raises:
        RefusedError: neither a draft nor a kind without weights, or a draft of an unknown kind.
    """
    if draft_dir is None and not isinstance(SERVED.get(kind or ""), WithoutWeights):
        next_step = "give --draft, or --draft-kind ngram or none"
        raise RefusedError("--draft", "nothing", "a checkpoint directory", next_step)
    if kind is None and draft_dir is not None:
        manifest = read_manifest(draft_dir)
        kind = manifest.draft_kind if manifest is not None else ""
    if draft_dir is not None:
        config = read_config(draft_dir, "--draft")
        kind = _block_kind(config, kind or None, draft_dir) or kind
        if not kind:
            layout = read_layout(draft_dir)
            known = (
                name
                for name, served in SERVED.items()
                if any(served.has(tensor, config) for tensor in layout)
            )
            # A causal language model's names; published EAGLE-3 drafts may have them beside fc.
            model = _FIRST_LAYER & layout.keys() and "fc.weight" not in layout
            kind = next(known, "draft_model" if model else "eagle3")
    if kind not in SERVED:
        expected = f"one of {[*SERVED]}"
        raise RefusedError(f"draft_kind of {draft_dir}", kind, expected, "install this release's")
    return SERVED[kind]


def _block_kind(config: Mapping[str, Any], kind: str | None, draft_dir: Path) -> str | None:
    """The kind of a block draft, None for others.

    Raises RefusedError: another kind was asked for, or vLLM loads it and a swap would tear it.
    """
    found = config.get("architectures")
    names = [*map(str, found)] if isinstance(found, list) else []
    field = f"{draft_dir / 'config.json'}: architectures"
    for served in SERVED.values():
        if not isinstance(served, Dflash):
            continue
        said = served.architecture in names
        if config.get(SPECULATORS) == served.name if SPECULATORS in config else said:
            if kind not in (None, served.name):
                expected = f"{kind}, as asked for"
                raise RefusedError(field, served.architecture, expected, "leave --draft-kind out")
            return served.name
    for name in names:
        if _NOT_SWAPPED.search(name.lower()):
            expected = f"a draft of a kind that can be swapped: {', '.join(SERVED)}"
            raise RefusedError(field, name, expected, "vLLM alone may serve it")
    return None


__all__ = ["SERVED", "Served", "WithoutWeights", "served_by"]
