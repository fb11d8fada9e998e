"""``draft-trainer init``: an untrained draft for a policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from draft_trainer.cli.trainer import Count, ExtraNorm, File, Needed, at_least
from slipstream.errors import RefusedError
from slipstream.hub import local_folder

if TYPE_CHECKING:
    from draft_trainer.checkpoints import PolicyCheckpoint
    from draft_trainer.drafters import Draft


_KINDS_OF = {
    "aux_layers": ("eagle3", "dflash", "dspark"),
    "intermediate_size": ("eagle3", "dflash", "dspark"),
    "rollouts": ("eagle3",),
    "norms": ("eagle3",),
    "mask_token": ("dflash", "dspark"),
    "layers": ("dflash", "dspark"),
    "markov_rank": ("dspark",),
}
"""The mechanisms that an option is for."""


@dataclass(frozen=True, kw_only=True)
class Init:
    """Make a draft for a policy, or extract the policy's own MTP head.

    By default, makes an untrained EAGLE-3 draft that vLLM loads: sizes, lm_head and final norm are
    the policy's, and it can propose every token, or with --rollouts the commonest ones. With
    --draft-kind dflash or dspark, makes an untrained block draft, whose embeddings and lm_head are
    the policy's. With mtp, extracts only the policy's MTP head. Train the draft with draft-trainer
    warmup --draft or draft-trainer serve.
    """

    policy: Needed
    """The policy: a Hugging Face checkpoint (safetensors), or its name on the hub."""
    out: Needed
    """The draft; must not exist."""
    aux_layers: Annotated[str | None, arg(metavar="L,L,L", help_behavior_hint="(optional)")] = None
    """The draft reads after these decoder layers (default: 2, n // 2 and n - 3 of n)."""
    intermediate_size: Count = None
    """Width of the draft's MLP; by default the policy's."""
    rollouts: File = None
    """eagle3: file with one {"prompt": [token ids], "completion": [token ids]} per line. The draft
    vocabulary is the smallest multiple of 1024 that covers 99.9 % of the tokens of prompts that did
    not choose it, and at most 32000."""
    norms: tuple[ExtraNorm, ...] = ()
    """eagle3: further norms, as in EAGLE-3.1: of the output that the next step takes (norm_output),
    of each auxiliary state (fc_norm), and of queries and keys (qk_norm)."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Seed of the random weights."""
    draft_kind: Literal["eagle3", "mtp", "dflash", "dspark"] = "eagle3"
    """The draft's mechanism."""
    mask_token: Count = None
    """dflash, dspark: id of a token that occurs in no text, to mark the positions of proposed
    tokens."""
    layers: Count = None
    """dflash, dspark: number of decoder layers (default 2)."""
    markov_rank: Count = None
    """dspark: rank of the Markov head (default 256)."""

    def run(self) -> int:
        """Writes the draft and prints what was made."""
        from draft_trainer.checkpoints import read_policy
        from draft_trainer.drafters import DRAFTERS
        from draft_trainer.drafters.rope import Rope
        from draft_trainer.files import check_free, folder_written_whole

        for name, kinds in _KINDS_OF.items():
            if getattr(self, name) not in (None, ()) and self.draft_kind not in kinds:
                field = f"--{name.replace('_', '-')}"
                expected = f"nothing with --draft-kind {self.draft_kind}"
                raise RefusedError(field, getattr(self, name), expected, "leave it out")
        at_least("--intermediate-size", self.intermediate_size, 1)
        layers = None if self.aux_layers is None else layers_of(self.aux_layers)
        check_free(self.out, "--out")
        folder = local_folder(self.policy, "--policy")
        if self.draft_kind == "mtp":
            checkpoint = DRAFTERS["mtp"].read(folder)
            with folder_written_whole(self.out) as temporary:
                checkpoint.write(temporary)
            print(f"{self.out}: {len(checkpoint.tensors)} tensors of the policy's MTP head")
            return 0
        policy = read_policy(folder)
        if self.draft_kind in ("dflash", "dspark"):
            head, told = self._dflash(policy, layers)
        else:
            head, told = self._eagle3(policy, folder, layers)
        told = "; ".join(filter(None, (told, Rope.of_draft(policy.config)[1])))
        with folder_written_whole(self.out) as temporary:
            DRAFTERS[head.kind].save(temporary, head)
        print(
            f"{self.out}: {sum(p.numel() for p in head.parameters()):,} parameters; auxiliary "
            f"states after layers {', '.join(map(str, head.config.aux_layer_ids))}; {told}"
        )
        return 0

    def _eagle3(
        self, policy: PolicyCheckpoint, folder: Path, layers: tuple[int, ...] | None
    ) -> tuple[Draft, str]:
        """The draft, and its vocabulary in words."""
        from draft_trainer.drafters.initial import init_draft

        shape: dict[str, Any] = {
            "aux_layer_ids": layers,
            "intermediate_size": self.intermediate_size,
            "norms": self.norms,
            "seed": self.seed,
        }
        if self.rollouts is None:
            head = init_draft(policy, None, **shape)
            return head, f"draft vocabulary: all {head.config.vocab_size:,} tokens"
        from transformers import AutoTokenizer

        from draft_trainer.checkpoints import size_of
        from draft_trainer.warmup.rollouts import Reading, RolloutFile
        from draft_trainer.warmup.vocabulary import new_draft

        file = RolloutFile(
            self.rollouts,
            size_of(policy.config, "vocab_size"),
            AutoTokenizer.from_pretrained(folder),
            temperature=1.0,
            seed=self.seed,
        )
        told: list[str] = []
        with Reading(file, 0) as reading:
            made = new_draft(
                policy, reading, size=None, most_tokens=None, tell=told.append, **shape
            )
        return made, told[-1] if told else "draft vocabulary: all tokens"

    def _dflash(
        self, policy: PolicyCheckpoint, layers: tuple[int, ...] | None
    ) -> tuple[Draft, str]:
        """The draft, and its depth in words."""
        from draft_trainer.drafters.initial import init_dflash

        at_least("--layers", self.layers, 1)
        at_least("--markov-rank", self.markov_rank, 1)
        if self.mask_token is None:
            expected = "the id of a token that no text has"
            raise RefusedError("--mask-token", "nothing", expected, "choose a reserved token")
        head = init_dflash(
            policy,
            self.mask_token,
            layers=self.layers or 2,
            aux_layer_ids=layers,
            intermediate_size=self.intermediate_size,
            markov_rank=(self.markov_rank or 256) if self.draft_kind == "dspark" else None,
            seed=self.seed,
        )
        return head, f"{len(head.layers)} layers"


def layers_of(text: str) -> tuple[int, ...]:
    """The numbers of ``--aux-layers``. Raises RefusedError: they are none."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise RefusedError(
            "--aux-layers", repr(text), "numbers as in 2,18,33", "separate them by commas"
        ) from error
