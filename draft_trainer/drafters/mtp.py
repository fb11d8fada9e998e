"""Native multi-token-prediction heads: one decoder layer over the policy's own final state.

For the anchor i and step s: token in x_{i+1+s}, position i + s, hidden state in the policy's final
state h_i (after its final norm) at s = 0 and the head's own output of step s - 1 afterwards;
attention to the step-0 keys of positions up to i and to the anchor's own keys of steps 1 .. s; the
output predicts x_{i+2+s} through the policy's lm_head. This is what vLLM's V1 runner computes with
one module for all draft positions. Embeddings and lm_head are the policy's and follow its versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draft_trainer.checkpoints import Refuse, read_policy_config, size_of
from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead
from draft_trainer.drafters.block import MLP, Block, BlockShape
from draft_trainer.drafters.draft import (
    Checkpoint,
    Draft,
    DraftShape,
    OneLayout,
    StoredShape,
    check_fits,
)
from draft_trainer.drafters.ops import linear
from draft_trainer.drafters.rope import Rope
from slipstream.checkpoints import (
    CONFIG_FILE,
    MIMO,
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

CORRECTION = "e_score_correction_bias"
_MIXTURE = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of a mixture.

    Attributes:
        count: E, in ``groups`` groups of neighbours.
        chosen: K, the experts of a token, from its ``chosen_groups`` best groups.
        width: width of one expert; the shared one is ``shared`` times as wide.
        renormalize: the weights of a token's experts sum to 1 before they are scaled.
        scale: factor of these weights.
    """

    count: int
    groups: int
    chosen_groups: int
    chosen: int
    width: int
    shared: int
    renormalize: bool
    scale: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ExpertsShape:
        """Read a policy's config.json. Raises RefusedError: a number is missing or impossible."""
        count, groups, best, chosen = sizes = [size_of(config, name) for name in _MIXTURE]
        in_group, rest = divmod(count, groups)
        if rest or in_group < 2 or best > groups or chosen > best * in_group:
            expected = "groups of two or more, and no more experts of a token than in its groups"
            next_step = "give a model that vLLM loads"
            raise RefusedError(f"config.json {', '.join(_MIXTURE)}", sizes, expected, next_step)
        width, shared = (size_of(config, n) for n in ("moe_intermediate_size", "n_shared_experts"))
        scale, renormalize = config["routed_scaling_factor"], config["norm_topk_prob"] is True
        return cls(count, groups, best, chosen, width, shared, renormalize, float(scale))


class Experts(nn.Module):
    """A mixture of experts as in GLM-4.5, in place of a layer's SwiGLU.

    A sigmoid router chooses experts from the best groups of them; every token has a shared one
    besides. Parameters have the names of checkpoints. Source: ``Glm4MoeMoE`` of transformers;
    vLLM's ``glm4_moe.py`` computes the same.
    """

    def __init__(self, hidden_size: int, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(hidden_size, shape.count, bias=False)
        # Balances the experts where the policy is trained; no gradient passes through a choice.
        self.gate.register_buffer(CORRECTION, torch.zeros(shape.count, dtype=torch.float32))
        self.experts = nn.ModuleList(MLP(hidden_size, shape.width) for _ in range(shape.count))
        self.shared_experts = MLP(hidden_size, shape.width * shape.shared)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H], in the type of ``x``."""
        rows = x.flatten(0, -2)
        weights, chosen = self._routed(rows)
        out = self.shared_experts(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                weighted = expert(rows[row]) * weights[row, place, None]
                out = out.index_add(0, row, weighted.to(x.dtype))
        return out.view_as(x)

    def _routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each of [N, H], both [N, K]; at least float32."""
        shape, wide = self.shape, torch.promote_types(rows.dtype, torch.float32)
        scores = F.linear(rows.to(wide), self.gate.weight.to(wide)).sigmoid()
        grouped = (scores + self.gate.get_buffer(CORRECTION)).unflatten(1, (shape.groups, -1))
        best = grouped.topk(2)[0].sum(-1).topk(shape.chosen_groups)[1]
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        chosen = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1).topk(shape.chosen)[1]
        weights = scores.gather(1, chosen)
        if shape.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * shape.scale, chosen


PARTS = ("fc.", "embed_norm.", "hidden_norm.", "layer.", "norm.")
"""The prefixes of the parameters' names in ``MtpHead``."""


@dataclass(frozen=True)
class Family:
    """A family of MTP heads: what they differ in from the others.

    Attributes:
        modules: names of the checkpoint's config.json that say how many modules there are.
        prefix: begins every tensor's name in the checkpoint; config.json's fields are in braces.
        names: what follows there for ``PARTS``; None: the head has no such part.
        block: whose decoder layer it has: "llama", "qwen2", "qwen3_next" or "glm4_moe".
        embedding_first: the fused vector begins with the embedding, not with the hidden state.
        blind_start: the embedding at position 0 counts as zeros.
        norm_fed: the next step takes the output after the norm, as lm_head does, not before it.
        copies: names after the prefix of copies of the policy's tensors, which are not read.
    """

    modules: tuple[str, ...]
    prefix: str
    names: tuple[str | None, ...]
    block: str
    embedding_first: bool
    blind_start: bool
    norm_fed: bool = True
    copies: tuple[str, ...] = ()


_QWEN = Family(
    ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "mtp.",
    ("fc.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "layers.0.", "norm."),
    block="qwen3_next",
    embedding_first=True,
    blind_start=False,
)
FAMILIES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), _QWEN),
    "mimo": Family(
        ("num_nextn_predict_layers",),
        "model.mtp_layers.",
        ("0.input_proj.", "0.token_layernorm.", "0.hidden_layernorm.", "0.", "0.final_layernorm."),
        block="qwen2",
        embedding_first=False,
        blind_start=True,
    ),
    # Its block rotates halves of a head in vLLM, although the policy's layers rotate neighbours.
    "ernie4_5_moe": Family(
        ("num_nextn_predict_layers",),
        "model.mtp_",
        ("linear_proj.0.", "emb_norm.0.", "hidden_norm.0.", "block.0.", None),
        block="llama",
        embedding_first=True,
        blind_start=True,
    ),
    "glm4_moe": Family(
        ("num_nextn_predict_layers", "num_mtp_layers"),
        "model.layers.{num_hidden_layers}.",
        ("eh_proj.", "enorm.", "hnorm.", "", "shared_head.norm."),
        block="glm4_moe",
        embedding_first=True,
        blind_start=True,
        norm_fed=False,
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
}
"""The families by the language model's ``model_type``."""

_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "layer_scale": (False, None),
    "qkv_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "mtp_use_dedicated_embeddings": (False, None),
    "dual_chunk_attention_config": (None,),
}
_NO_BIAS = dict.fromkeys(("attention_bias", "bias", "use_bias"), (False, None))
_refuse = Refuse(
    "the policy's config.json",
    f"MTP heads of {', '.join(FAMILIES)} are supported; for this policy, adapt an EAGLE-3 "
    'draft (draft.kind = "eagle3")',
)


@dataclass(frozen=True, kw_only=True)
class MtpConfig(StoredShape):
    """Everything that determines the head's function besides its weights; also see ``StoredShape``.

    vLLM has no configuration for a head alone: it reads the policy's, so a release carries that
    one. The families have the names and the function of vLLM 0.32's ``models/*_mtp.py``: one
    module, whose block is dense but for GLM's.

    Attributes:
        family: one of ``FAMILIES``.
        block: its decoder layer; its norms are of the same kind.
        experts: the mixture in place of its SwiGLU, or None.
        document: the policy's config.json, ``without_code``.
    """

    family: str
    experts: ExpertsShape | None

    @property
    def plain_logits(self) -> bool:
        """True, as in vLLM's MTP heads, whatever the policy does to its logits."""
        return True

    @property
    def prefix(self) -> str:
        """The prefix of every tensor's name in the checkpoint."""
        return FAMILIES[self.family].prefix.format(**text_config(self.document))

    def stored(self, name: str) -> str:
        """The name in the checkpoint of a tensor of ``MtpHead``."""
        at, part = next((at, part) for at, part in enumerate(PARTS) if name.startswith(part))
        return f"{self.prefix}{FAMILIES[self.family].names[at]}{name.removeprefix(part)}"

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> MtpConfig:
        """Read the policy's ``config.json`` as vLLM reads it for the head.

        Raises:
            RefusedError: a field is missing, or the policy's head is one that is not represented:
                with latent attention, with experts, with several modules.
        """
        text = text_config(document)
        family = FAMILIES[name := _family(document, text)]
        qwen2, qwen3_next, glm = (family.block == b for b in ("qwen2", "qwen3_next", "glm4_moe"))
        # vLLM's Qwen2 has biases whatever the config.json says, and GLM's block as it says.
        _refuse.other_values(text, _FIXED_VALUES if qwen2 or glm else _FIXED_VALUES | _NO_BIAS)
        for field in family.modules:
            if text.get(field, 1) != 1:
                _refuse(field, text[field], "1: vLLM's V1 runner runs the first module alone")
        if document.get("quantization_config") is not None:
            _refuse("quantization_config", "one", "none: give the policy as it was trained")
        vocab, layers = size_of(text, "vocab_size"), size_of(text, "num_hidden_layers")
        if qwen3_next or glm:
            # Their default, where it is missing, is not hidden / heads.
            size_of(text, "head_dim")
        if glm and text["first_k_dense_replace"] > layers:
            _refuse("first_k_dense_replace", text["first_k_dense_replace"], f"at most {layers}")
        return cls(
            aux_layer_ids=(),
            target_hidden_size=size_of(text, "hidden_size"),
            vocab_size=vocab,
            draft_vocab_size=vocab,
            family=name,
            block=BlockShape.of(
                *(text, "the policy's", _rope(text, family)),
                qk_norm=qwen3_next or (glm and text.get("use_qk_norm") is True),
                qkv_bias=qwen2 or (glm and text.get("attention_bias") is True),
                output_gate=qwen3_next and text.get("attn_output_gate", True) is True,
                zero_centred=qwen3_next,
            ),
            experts=ExpertsShape.of(text) if glm else None,
            document=without_code(document),
        )


def _family(document: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return the head's family. Raises RefusedError: one that is not represented."""
    kind = "mimo" if document.get("architectures") == [MIMO] else text.get("model_type")
    if text.get("kv_lora_rank") is not None:
        _refuse("kv_lora_rank", text["kv_lora_rank"], "none: latent attention is not represented")
    experts = next((n for n in ("num_experts", "n_routed_experts") if text.get(n)), None)
    dense = 0 in (text.get("mlp_only_layers") or ()) or text.get("decoder_sparse_step", 1) != 1
    taken = kind in ("ernie4_5_moe", "glm4_moe") or (kind == "qwen3_next" and dense)
    if experts is not None and not taken:
        _refuse(experts, text[experts], "0, or a dense MTP block, or GLM-4.5's: no other experts")
    if kind not in FAMILIES:
        _refuse("model_type", kind, f"one of {[*FAMILIES]}")
    return str(kind)


def _rope(text: Mapping[str, Any], family: Family) -> Rope:
    rope = Rope.of_policy(text)
    named = {**text, **(text.get("rope_parameters") or {})}
    partly = family.block in ("qwen3_next", "glm4_moe")
    if partly and named.get("partial_rotary_factor") is None:
        # transformers' default for these is a quarter or a half, not the whole head.
        _refuse("partial_rotary_factor", "nothing", "a number")
    return rope


class MtpHead(Draft):
    """The trainable part of an MTP head; ``MtpConfig.stored`` gives the checkpoint's names.

    Args:
        config: its shape.
    """

    kind = "mtp"
    lm_head = None

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config: MtpConfig = config
        shape, experts = config.block, config.experts
        self.embed_norm, self.hidden_norm = shape.norm(), shape.norm()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = Block(shape, Experts(shape.hidden_size, experts) if experts else None)
        has_norm = FAMILIES[config.family].names[PARTS.index("norm.")] is not None
        self.norm = shape.norm() if has_norm else nn.Identity()

    def normed(self, output: Tensor) -> Tensor:
        """Return the output itself where ``unroll`` has normed it, as the next step takes it so."""
        return output if FAMILIES[self.config.family].norm_fed else self.norm(output)

    def unroll(self, batch: Batch, steps: int, first_anchor: int = 0) -> Iterator[Tensor]:
        """See ``Draft.unroll``; it computes in the type of the parameters."""
        family, dtype = FAMILIES[self.config.family], self.fc.weight.dtype
        halves = self.fc.weight.chunk(2, dim=1)
        fc_of_embeds, fc_of_hidden = halves if family.embedding_first else halves[::-1]
        # The embeddings' half of the product is the same at every step except for a shift.
        tokens_in = linear(self.embed_norm(batch.embeds.to(dtype)), fc_of_embeds)
        hidden, positions = batch.final_hidden.to(dtype), batch.positions
        prefix: tuple[Tensor, Tensor] | None = None
        later: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            tokens_in = fed = ahead(tokens_in, 1)
            if family.blind_start and step == 0:
                fed = tokens_in * (positions != 0)[..., None]
            fused = fed + linear(self.hidden_norm(hidden), fc_of_hidden)
            q, k, v, gate = self.layer.project(fused, positions + step)
            if prefix is None:
                prefix = (k, v)
                q, fused, positions, tokens_in = (
                    x[:, first_anchor:] for x in (q, fused, positions, tokens_in)
                )
                gate = None if gate is None else gate[:, first_anchor:]
            else:
                later.append((k, v))
            attended = ttt_attention(q, *prefix, later)
            hidden = self.layer.finish(fused, attended, gate)
            if family.norm_fed:
                hidden = self.norm(hidden)
            yield hidden


class Mtp(OneLayout):
    """The policy's config.json and the head's tensors, under the policy's own names.

    Read from the policy's own checkpoint, or from a release, which has these tensors alone; both
    are directories that vLLM loads with ``"method": "mtp"``.
    """

    name, module, shape, advice = MtpHead.kind, MtpHead, MtpConfig, _ADVICE

    def stored_name(self, config: DraftShape, name: str) -> str:
        """See ``OneLayout.stored_name``."""
        assert isinstance(config, MtpConfig)
        return config.stored(name)

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``; the rest of the checkpoint, the policy's weights, is not read."""
        weight_files(directory)  # refuses a pickle before anything that is missing
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
