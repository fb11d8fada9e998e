"""MTP checkpoints: the policy's config.json and the head's tensors, under the policy's own names.

Read from the policy's own checkpoint, or from a release, which has these tensors alone; both are
directories that vLLM loads with ``"method": "mtp"``.
"""

from __future__ import annotations

from pathlib import Path

from draft_trainer.checkpoints.policy import read_policy_config
from draft_trainer.drafters.draft import Checkpoint, DraftShape, OneLayout, check_fits
from draft_trainer.drafters.mtp.config import FAMILIES, MtpConfig
from draft_trainer.drafters.mtp.head import MtpHead
from slipstream.checkpoints import (
    CONFIG_FILE,
    load_tensors,
    text_config,
    weight_files,
    without_code,
)
from slipstream.errors import RefusedError
from slipstream.hub import read_json

_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
_ADVICE = (
    "give the policy's own checkpoint, or a release of its MTP head; a policy without one can have "
    "an EAGLE-3 draft"
)


class Mtp(OneLayout):
    """Checkpoints of native MTP heads."""

    name, module, shape, advice = MtpHead.kind, MtpHead, MtpConfig, _ADVICE

    def stored_name(self, config: DraftShape, name: str) -> str:
        """See ``OneLayout.stored_name``."""
        assert isinstance(config, MtpConfig)
        return config.stored(name)

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``; whatever else the checkpoint has, the policy's weights, is left."""
        weight_files(directory)  # a pickle is the better reason than what else is missing
        document = read_json(directory / CONFIG_FILE, _ADVICE)
        config: MtpConfig = self.shape_of(directory, document)
        if policy is not None:
            ours, theirs = text_config(config.document), without_code(read_policy_config(policy))
            check_fits({name: ours.get(name) for name in _SIZES}, theirs, _ADVICE)
        stored = load_tensors(directory, config.prefix)
        for copy in FAMILIES[config.family].copies:
            stored.pop(config.prefix + copy, None)
        if not stored:
            expected = f"tensors {config.prefix}*, which a policy with an MTP head has"
            raise RefusedError(str(directory), "none of them", expected, _ADVICE)
        released = config.to_dict()
        return self.checkpoint(directory, config, stored, released, released == document)
