"""Draft mechanisms on the server's side: vLLM's settings, and what a stage may replace."""

from __future__ import annotations

from pathlib import Path

from rollout_server.checkpoint import read_config, read_layout, read_manifest
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
        WithoutWeights("ngram", {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        WithoutWeights("none", None),
    )
}
"""By ``--draft-kind``."""

_BLOCKS = ("dflash", "dspark")


def served_by(kind: str | None, draft_dir: Path | None) -> Served:
    """The mechanism that was asked for, or that the draft's manifest or tensors say.

    Raises:
        RefusedError: neither a draft nor a kind without weights, or a draft of an unknown kind.
    """
    if draft_dir is None and not isinstance(SERVED.get(kind or ""), WithoutWeights):
        next_step = "give --draft, or --draft-kind ngram or none"
        raise RefusedError("--draft", "nothing", "a checkpoint directory", next_step)
    if draft_dir is not None:
        _refuse_block_drafts(draft_dir)
    if kind is None and draft_dir is not None:
        manifest = read_manifest(draft_dir)
        kind = manifest.draft_kind if manifest is not None else ""
        if not kind:
            layout = read_layout(draft_dir, "--draft")
            known = (name for name, served in SERVED.items() if any(map(served.has, layout)))
            kind = next(known, "eagle3")
    if kind not in SERVED:
        expected = f"one of {[*SERVED]}"
        raise RefusedError(f"draft_kind of {draft_dir}", kind, expected, "install this release's")
    return SERVED[kind]


def _refuse_block_drafts(draft_dir: Path) -> None:
    """Refuse drafts that vLLM loads and a swap would tear (``swap.derived_tensors``)."""
    architectures = read_config(draft_dir, "--draft").get("architectures")
    names = architectures if isinstance(architectures, list) else []
    found = [name for name in names if any(block in str(name).lower() for block in _BLOCKS)]
    if found:
        raise RefusedError(
            f"{draft_dir / 'config.json'}: architectures",
            ", ".join(map(str, found)),
            f"a draft of a kind that can be swapped: {', '.join(SERVED)}",
            "vLLM derives tensors from this one's weights when it loads it, and would draft with "
            "the old ones after a swap: serve it with vLLM alone",
        )


__all__ = ["SERVED", "Served", "WithoutWeights", "served_by"]
