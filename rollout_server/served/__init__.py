"""Draft mechanisms on the server's side: vLLM's settings, and what a stage may replace."""

from __future__ import annotations

from pathlib import Path

from rollout_server.checkpoint import read_config, read_layout, read_manifest
from rollout_server.served.dflash import ARCHITECTURE, Dflash
from rollout_server.served.draft_model import DraftModel
from rollout_server.served.eagle3 import Eagle3
from rollout_server.served.mtp import Mtp
from rollout_server.served.served import Served, WithoutWeights
from slipstream.errors import RefusedError

SERVED: dict[str, Served] = {
    served.name: served
    for served in (
        Eagle3(),
        Mtp(),
        DraftModel(),
        Dflash(),
        WithoutWeights("ngram", {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        WithoutWeights("none", None),
    )
}
"""By ``--draft-kind``."""

_OTHERS = {
    "dflash": "another one's modules than DFlashDraftModel's are not known to a swap",
    "dspark": "vLLM serves DSpark on GPUs alone, where a swap was never tried",
    "peagle": "its mask_hidden is projected by fc when vLLM starts, outside the draft's modules",
    "eagle3": "",
    "eagle": "EAGLE-1 is not trained: make an EAGLE-3 draft, which accepts more",
}
"""Why a draft is not served, by what its architecture's name has; the first, empty if it is."""


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
        found = read_config(draft_dir, "--draft").get("architectures")
        names = [*map(str, found)] if isinstance(found, list) else []
        _refuse_others(names, kind or None, draft_dir)
        if not kind and ARCHITECTURE in names:
            kind = Dflash.name
        if not kind:
            layout = read_layout(draft_dir, "--draft")
            known = (name for name, served in SERVED.items() if any(map(served.has, layout)))
            kind = next(known, "eagle3")
    if kind not in SERVED:
        expected = f"one of {[*SERVED]}"
        raise RefusedError(f"draft_kind of {draft_dir}", kind, expected, "install this release's")
    return SERVED[kind]


def _refuse_others(architectures: list[str], kind: str | None, draft_dir: Path) -> None:
    """Refuse drafts that vLLM loads and a swap would tear, or that nothing here trains."""
    for name in architectures:
        why = next((why for part, why in _OTHERS.items() if part in name.lower()), "")
        if name == ARCHITECTURE:
            why = "" if kind in (None, Dflash.name) else f"it is a DFlash draft, not {kind}"
        if why:
            raise RefusedError(
                f"{draft_dir / 'config.json'}: architectures",
                name,
                f"a draft of a kind that can be swapped: {', '.join(SERVED)}",
                f"{why}; vLLM alone may serve it",
            )


__all__ = ["SERVED", "Served", "WithoutWeights", "served_by"]
