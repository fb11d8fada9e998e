"""DFlash checkpoints: config.json and the draft's own tensors, as DFlash's authors name them."""

from __future__ import annotations

from pathlib import Path

from draft_trainer.checkpoints.policy import read_policy_config
from draft_trainer.drafters.dflash.config import DflashConfig
from draft_trainer.drafters.dflash.head import DflashHead
from draft_trainer.drafters.draft import Checkpoint, OneLayout, check_fits
from slipstream.checkpoints import CONFIG_FILE, WEIGHTS_FILE, load_tensors, pickles
from slipstream.errors import RefusedError
from slipstream.hub import read_json

_ADVICE = "give a DFlash draft for this policy, or make one: draft-trainer init --draft-kind dflash"
_POLICYS = ("embed_tokens.weight", "lm_head.weight")


class Dflash(OneLayout):
    """Checkpoints of DFlash drafts; copies of the policy's embeddings and lm_head are left out."""

    name, module, shape, advice = DflashHead.kind, DflashHead, DflashConfig, _ADVICE

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``."""
        stored, document = load_tensors(directory), read_json(directory / CONFIG_FILE, _ADVICE)
        if pickled := pickles(directory):
            # vLLM would load a mask_embedding.pt in place of the mask token's embedding.
            raise RefusedError(str(directory / pickled[0]), "a pickle", WEIGHTS_FILE, _ADVICE)
        config: DflashConfig = self.shape_of(directory, document)
        if policy is not None:
            theirs = read_policy_config(policy)
            sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
            check_fits(sizes, theirs, _ADVICE)
            depth = theirs.get("num_hidden_layers")
            if not isinstance(depth, int) or config.aux_layer_ids[-1] >= depth:
                raise RefusedError(
                    "the draft's target_layer_ids",
                    [layer - 1 for layer in config.aux_layer_ids],
                    f"outputs of the policy's {depth} layers, without the last one's, which "
                    "cannot be captured",
                    _ADVICE,
                )
        own = {name: tensor for name, tensor in stored.items() if name not in _POLICYS}
        return self.checkpoint(directory, config, own, document)
