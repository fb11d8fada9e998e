"""MTP checkpoints: the policy's config.json and the head's tensors, under the policy's own names.

Read from the policy's own checkpoint, or from a release, which has these tensors alone; both are
directories that vLLM loads with ``"method": "mtp"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draft_trainer.checkpoints.draft import (
    WEIGHTS_FILE,
    check_tensors,
    load_tensors,
    read_document,
    tensor_names,
    weight_files,
)
from draft_trainer.checkpoints.policy import read_policy_config
from draft_trainer.drafters.draft import Checkpoint, Draft, Drafter
from draft_trainer.drafters.mtp.config import FAMILIES, MtpConfig
from draft_trainer.drafters.mtp.head import MtpHead
from slipstream.errors import RefusedError

_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


class Mtp(Drafter):
    """Checkpoints of native MTP heads."""

    name = MtpHead.kind

    def build(self, document: Mapping[str, Any]) -> MtpHead:
        """See ``Drafter.build``."""
        return MtpHead(MtpConfig.from_dict(document))

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``; whatever else the checkpoint has, the policy's weights, is left."""
        weight_files(directory)  # a pickle is the better reason than what else is missing
        document = read_document(directory, _ADVICE)
        config = MtpConfig.from_dict(document)
        if policy is not None:
            theirs, ours = read_policy_config(policy), document.get("text_config") or document
            for name in _SIZES:
                if ours.get(name) != theirs.get(name):
                    expected = f"{theirs.get(name)}, for this policy"
                    raise _refused(f"the draft's {name}", ours.get(name), expected)
        family = FAMILIES[config.family]
        stored = load_tensors(directory, family.prefix)
        if not stored:
            expected = f"tensors {family.prefix}*, which a policy with an MTP head has"
            raise _refused(directory, "none of them", expected)
        with torch.device("meta"):
            wanted = {name: p.shape for name, p in MtpHead(config).state_dict().items()}
        names = {name: family.stored(name) for name in wanted}
        check_tensors(
            stored, {names[name]: shape for name, shape in wanted.items()}, str(directory), _ADVICE
        )
        return Checkpoint(
            module=MtpHead,
            config=config,
            tensors={name: stored[names[name]] for name in names},
            d2t=None,
            document=document,
            names=names,
            with_t2d=False,
            as_stored=tensor_names(directory) == stored.keys()
            and (directory / WEIGHTS_FILE).is_file(),
        )

    def save(
        self,
        directory: Path,
        draft: Draft,
        dtype: torch.dtype = torch.bfloat16,
        *,
        layout: str = "plain",
        policy: Path | None = None,
        like: Path | None = None,
    ) -> None:
        """See ``Drafter.save``; there is one layout."""
        config = draft.config
        assert isinstance(config, MtpConfig), "a draft of another mechanism"
        if layout != "plain":
            raise _refused("layout", layout, "plain, the only one of MTP heads")
        document = dict(config.document) if like is None else read_document(like, _ADVICE)
        tensors = {name: t.detach().to("cpu", dtype) for name, t in draft.state_dict().items()}
        names = {name: FAMILIES[config.family].stored(name) for name in tensors}
        Checkpoint(
            *(MtpHead, config, tensors, None, document, names), with_t2d=False, as_stored=True
        ).write(directory)


_ADVICE = (
    "give the policy's own checkpoint, or a release of its MTP head; a policy without one can have "
    "an EAGLE-3 draft"
)


def _refused(field: object, found: object, expected: object) -> RefusedError:
    return RefusedError(str(field), found, expected, _ADVICE)
