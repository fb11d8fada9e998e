"""The kinds of drafts that have weights, as vLLM serves them.

vLLM itself never notices an out-of-range layer or a wrong vocabulary map.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rollout_server.control.draft_folder import quantization, read_config, read_draft_layout
from rollout_server.vllm.served.served import Config, Served, check_path, check_sizes
from slipstream.checkpoints import (
    VOCABULARY_MAPS,
    Layout,
    check_maps,
    load_tensors,
    read_layout,
    text_config,
)
from slipstream.errors import RefusedError
from slipstream.layers import AUX_LAYERS, ambiguous_layers, check_layers, default_aux_layers

logger = logging.getLogger(__name__)

DFLASH_ARCHITECTURE = "DFlashDraftModel"
SPECULATORS = "speculators_model_type"
"""The key in a config.json of the speculators library's layout."""

_PARD_TOKEN = "pard_token"
"""The key in a config.json of a PARD draft, which proposes all tokens in one forward pass."""

_MTP_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
_OTHER_DRAFT = "give the draft that was trained for this model"
_OTHER_HEAD = "make it with draft-trainer init --draft-kind mtp, of this model or of one like it"


class Eagle3(Served):
    """A head with its own lm_head; its embeddings are the policy's as a rule."""

    name = "eagle3"
    follows_policy = ("embed_tokens",)

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        model = text_config(read_config(model_dir, "MODEL"))
        # Any dtypes: a quantized model takes drafts, too.
        read_layout(model_dir)
        hidden, depth, vocab = (
            _size(model, name, model_dir)
            for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        )
        config = read_config(draft_dir, "--draft")
        layout = read_draft_layout(draft_dir)
        # A speculators checkpoint nests the sizes.
        sizes: Mapping[str, Any] = config.get("transformer_layer_config") or config
        path = f"{draft_dir / 'config.json'}"
        if "model.fc.weight" in layout:
            found, step = "model.fc.weight", "serve release 0 of a registry that began with it"
            raise RefusedError(f"{draft_dir}: tensors", found, "fc.weight, as vLLM has it", step)
        if "fc.weight" not in layout and int(config.get("num_hidden_layers", 1)) > 1:
            found_kind = f"a language model ({config['num_hidden_layers']} layers, no fc.weight)"
            make = f"draft-trainer init --policy {model_dir} --out DIR"
            step = f"make one ({make}), or let this model draft: --draft-kind draft_model"
            raise RefusedError(f"--draft {draft_dir}", found_kind, "an EAGLE-3 draft", step)
        width = int(config.get("target_hidden_size") or sizes.get("hidden_size", 0))
        if width != hidden:
            expected = f"{hidden} (hidden_size of {model_dir})"
            raise RefusedError(f"{path}: hidden_size", width, expected, _OTHER_DRAFT)
        layers = _aux_layers(config, depth, f"{path}:")
        fc, width = layout.get("fc.weight"), len(layers) * hidden
        if fc is None or len(fc.shape) != 2 or fc.shape[1] != width:
            raise RefusedError(
                f"{draft_dir}: fc.weight",
                "absent" if fc is None else list(fc.shape),
                f"[draft hidden size, {width}] for auxiliary layers {list(layers)}",
                "give an EAGLE-3 draft for this model and these layers",
            )
        tokens = sizes.get("vocab_size")
        if tokens != vocab:
            expected = f"{vocab} (the model's)"
            raise RefusedError(f"{path}: vocab_size", tokens, expected, _OTHER_DRAFT)
        rows = int(config.get("draft_vocab_size") or vocab)
        _check_vocabulary(rows, vocab, layout, draft_dir)


def _size(model: Mapping[str, Any], name: str, directory: Path) -> int:
    value = model.get(name)
    if not isinstance(value, int) or value < 1:
        field, found = f"{directory / 'config.json'}: {name}", "absent" if value is None else value
        expected = "a positive integer, at top level or in text_config"
        raise RefusedError(field, found, expected, "give a language model's checkpoint")
    return value


def _aux_layers(config: Mapping[str, Any], depth: int, where: str) -> tuple[int, ...]:
    nested = (config.get("eagle_config") or {}).get(AUX_LAYERS)
    ids = config.get(AUX_LAYERS) or nested
    if ids is None:
        assumed = default_aux_layers(depth)
        logger.warning("%s names no %s: vLLM assumes %s", where, AUX_LAYERS, [*assumed])
        return assumed
    # A policy of fewer than 8 layers has no default that the nested list could mean.
    usual = depth >= 8 and tuple(ids) == default_aux_layers(depth)
    if not config.get(AUX_LAYERS) and not usual:
        raise ambiguous_layers(where, nested)
    next_step = f"{_OTHER_DRAFT}; L means after L of its {depth} layers"
    return check_layers(ids, f"{where} {AUX_LAYERS}", next_step, last=depth)


def _check_vocabulary(rows: int, vocab: int, layout: Layout, draft_dir: Path) -> None:
    head = layout.get("lm_head.weight")
    if head is None or head.shape[0] != rows:
        raise RefusedError(
            f"{draft_dir}: lm_head.weight",
            "absent" if head is None else list(head.shape),
            f"[{rows}, hidden size] (draft_vocab_size)",
            "save the draft with its own lm_head: vLLM would share the model's, and a draft "
            "commit would then overwrite the model",
        )
    if rows > vocab:
        field = f"{draft_dir / 'config.json'}: draft_vocab_size"
        raise RefusedError(field, rows, f"at most {vocab}", "fix the configuration")
    maps = load_tensors(draft_dir, VOCABULARY_MAPS)
    if rows < vocab:
        check_maps(maps.get("d2t"), maps.get("t2d"), rows, vocab, str(draft_dir))
    elif "d2t" in maps:
        found, next_step = "present with a full vocabulary", "save the draft without d2t and t2d"
        raise RefusedError(f"{draft_dir}: d2t", found, "absent (vLLM cannot load it)", next_step)


class Mtp(Served):
    """A policy's native MTP head: its tensors in a policy's checkpoint, and nothing else.

    Embeddings and lm_head, GLM's ``shared_head.head``, are the verifier's modules
    (``_maybe_share_*`` in vLLM's ``v1/spec_decode/llm_base_proposer.py``): both follow policy
    pushes by themselves.
    """

    name = "mtp"
    follows_policy = ("embed_tokens", "lm_head", "head")
    names = ("mtp.", "model.mtp_")

    def has(self, name: str, config: Config) -> bool:
        """See ``Served.has``; GLM's is a layer after the policy's own."""
        text = text_config(config)
        if text.get("model_type") == "glm4_moe":
            return name.startswith(f"model.layers.{text.get('num_hidden_layers')}.")
        return super().has(name, config)

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        check_path(draft_dir)
        sizes = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        _, config = check_sizes(model_dir, draft_dir, sizes, _OTHER_HEAD)
        quantized = quantization(read_config(model_dir, "MODEL"), read_layout(model_dir))
        if quantized:
            # vLLM's MTP classes take the verifier's quantization, other drafts their own. Each
            # method decides which modules it leaves out; that is not read here.
            raise RefusedError(
                f"MODEL {model_dir}",
                quantized,
                "unquantized weights: an MTP head is not supported with a quantized MODEL",
                "serve the unquantized checkpoint, or a draft of another kind",
            )
        others = [
            name
            for name in read_draft_layout(draft_dir)
            if not self.has(name, config) or name.endswith(_MTP_COPIES)
        ]
        if others:
            raise RefusedError(
                f"{draft_dir}: tensors",
                f"{len(others)} others, such as {others[0]}",
                "only those of the MTP module, without copies of embeddings and lm_head",
                _OTHER_HEAD,
            )


class DraftModel(Served):
    """A small causal language model with the policy's vocabulary: nothing is shared."""

    name = "draft_model"

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        check_path(draft_dir)
        read_draft_layout(draft_dir)
        next_step = "give a draft model with the model's tokenizer"
        _, draft = check_sizes(model_dir, draft_dir, ("vocab_size",), next_step)
        token, last = draft.get(_PARD_TOKEN), int(draft["vocab_size"]) - 1
        if token is not None and not (type(token) is int and 0 <= token <= last):
            field, expected = f"{draft_dir / 'config.json'}: {_PARD_TOKEN}", f"0 to {last}"
            raise RefusedError(field, token, expected, "give the token it was trained with")

    def speculative_config(
        self, draft_dir: Path | None, draft_length: int, sample_method: str
    ) -> dict[str, Any] | None:
        """See ``Served.speculative_config``."""
        settings = super().speculative_config(draft_dir, draft_length, sample_method)
        assert draft_dir is not None and settings is not None, "a draft model has weights"
        if read_config(draft_dir, "--draft").get(_PARD_TOKEN) is not None:
            settings["parallel_drafting"] = True
        return settings


class Dflash(Served):
    """A block draft: one forward pass proposes all tokens. Names are those of DFlash's authors.

    Embeddings and lm_head are the verifier's modules, as with MTP heads; a draft with a vocabulary
    of its own has its own lm_head. Tensors that vLLM derives from the parameters are replaced with
    them (``served.derived``).

    Attributes:
        architecture: the class of vLLM that config.json names; speculators' files name theirs.
        nested: the object in config.json with its mask token and layers; empty: at top level.
        parts: what the names of its tensors begin with.
    """

    name = "dflash"
    follows_policy = ("embed_tokens", "lm_head")
    architecture: ClassVar[str] = DFLASH_ARCHITECTURE
    nested: ClassVar[str] = "dflash_config"
    parts: ClassVar[tuple[str, ...]] = ("fc.", "hidden_norm.", "norm.", "layers.")

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        path = f"{draft_dir / 'config.json'}"
        next_step = f"give a draft of this kind, {self.name}, that was trained for this model"
        config = read_config(draft_dir, "--draft")
        sizes = ("hidden_size", "vocab_size")
        model, draft = check_sizes(model_dir, draft_dir, sizes, next_step)
        nested, name, first = self.nested, "target_layer_ids", 0
        expected: object = [self.architecture]
        names = config.get("architectures")
        if SPECULATORS in config:
            nested, name, first = "", "aux_hidden_state_layer_ids", 1
            names, expected = config[SPECULATORS], self.name
        if names != expected:
            field = SPECULATORS if first else "architectures"
            raise RefusedError(f"{path}: {field}", names, expected, next_step)
        block, where = config, f"{path}: "
        if nested:
            block, where = config.get(nested) or {}, f"{where}{nested}."
        vocab, depth = int(model["vocab_size"]), int(model.get("num_hidden_layers") or 0)
        mask = block.get("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < vocab:
            expected = f"a token of the model, 0 to {vocab - 1}"
            raise RefusedError(f"{where}mask_token_id", mask, expected, next_step)
        last = depth - 1 + first
        layers = check_layers(block.get(name), f"{where}{name}", next_step, first, last)
        if (draft_dir / "mask_embedding.pt").exists():
            raise RefusedError(
                f"{draft_dir / 'mask_embedding.pt'}",
                "a pickle, which vLLM would load",
                "none: the mask is a token of the model's vocabulary",
                "leave it out; no stage could replace it",
            )
        layout, parts = read_draft_layout(draft_dir), self.parts
        rows = int(config.get("draft_vocab_size") or vocab)
        if rows != vocab:
            _check_vocabulary(rows, vocab, layout, draft_dir)
            parts += ("lm_head.", *VOCABULARY_MAPS)
        others = [name for name in layout if not name.startswith(parts)]
        if others:
            raise RefusedError(
                f"{draft_dir}: tensors",
                f"{len(others)} others, such as {others[0]}",
                f"only {', '.join(f'{part}*' for part in parts)}",
                "save the draft without embeddings and lm_head: they are the model's",
            )
        width, fc = len(layers) * int(model["hidden_size"]), layout.get("fc.weight")
        if fc is None or fc.shape != (draft["hidden_size"], width):
            found = "absent" if fc is None else list(fc.shape)
            expected = f"[{draft['hidden_size']}, {width}] for layers {[*layers]}"
            raise RefusedError(f"{draft_dir}: fc.weight", found, expected, next_step)


class Dspark(Dflash):
    """DFlash's block with a Markov head. vLLM has it on Model Runner V2 alone."""

    name = "dspark"
    architecture = "Qwen3DSparkModel"
    parts = (
        *Dflash.parts,
        *("markov_head.markov_w1.", "markov_head.markov_w2.", "confidence_head.proj."),
    )
    nested, runner_v2 = "", True
