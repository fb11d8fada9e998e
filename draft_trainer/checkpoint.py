"""Draft checkpoints in the plain layout that vLLM loads: config.json and model.safetensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.head import Eagle3Head, HeadConfig
from slipstream.layers import default_aux_layers
from slipstream.refusal import RefusedError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_REDUCED_VOCABULARY = ("d2t", "t2d")


def load_draft(directory: Path) -> tuple[HeadConfig, dict[str, Tensor], Tensor | None]:
    """Read a draft checkpoint.

    Returns:
        The configuration; the head's parameters by name, in the checkpoint's dtype; and d2t,
        int64 [draft_vocab] with target id = draft id + d2t[draft id], None for a full vocabulary.

    Raises:
        RefusedError: a file is missing or unreadable, a field or tensor is missing, unknown, of
            the wrong shape, not finite, or d2t is not ascending within the vocabulary.
    """
    config = HeadConfig.from_dict(_read_config(directory / CONFIG_FILE))
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, struct.error) as error:
        raise _refused(path, str(error), "a safetensors file") from error
    d2t, t2d = (tensors.pop(name, None) for name in _REDUCED_VOCABULARY)
    if "embed_tokens.weight" in tensors:
        raise _refused(
            path, "embed_tokens.weight", "no embeddings: the draft shares the policy's", _DROP_EMBED
        )
    with torch.device("meta"):
        wanted = {name: p.shape for name, p in Eagle3Head(config).state_dict().items()}
    if tensors.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted)
        raise _refused(path, f"missing {missing}, unknown {extra}", sorted(wanted))
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name]:
            raise _refused(f"{path}: {name}", list(tensor.shape), list(wanted[name]))
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise _refused(f"{path}: {name}", f"{tensor.dtype}, not finite", "finite numbers")
    if config.full_vocabulary:
        if d2t is not None or t2d is not None:
            # vLLM has no parameter to put it in and dies with a KeyError.
            raise _refused(path, "d2t", f"none: draft_vocab_size is {config.vocab_size}")
        return config, tensors, None
    if d2t is None:
        raise _refused(path, "no d2t", "d2t: the draft vocabulary is a part of the vocabulary")
    check_draft_vocabulary(target_ids(d2t), config, str(path))
    return config, tensors, d2t.long()


def load_head(directory: Path) -> tuple[Eagle3Head, Tensor | None]:
    """The head of a checkpoint in float32, and its d2t. Raises as ``load_draft``."""
    config, tensors, d2t = load_draft(directory)
    head = Eagle3Head(config, None if d2t is None else target_ids(d2t))
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head, d2t


def save_draft(
    directory: Path,
    config: HeadConfig,
    head: Eagle3Head,
    d2t: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a draft checkpoint into an existing directory. The same weights give the same bytes.

    Args:
        directory: where config.json and model.safetensors go.
        config: the head's.
        head: the weights, any floating dtype.
        d2t: int64 [draft_vocab]; None exactly when the vocabulary is full.
        dtype: element type to write.

    Raises:
        RefusedError: d2t does not fit the configuration.
    """
    if (d2t is None) != config.full_vocabulary:
        raise _refused("d2t", d2t is not None, f"{not config.full_vocabulary} for {config}")
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous().clone()
        for name, tensor in head.state_dict().items()
    }
    if d2t is not None:
        check_draft_vocabulary(target_ids(d2t), config, "d2t")
        tensors["d2t"] = d2t.long()
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][target_ids(d2t)] = True
    text = json.dumps(config.to_dict(str(dtype).removeprefix("torch.")), indent=2)
    (directory / CONFIG_FILE).write_text(text + "\n")
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors leaves 0600; a rollout server under another user must be able to read it.
    (directory / WEIGHTS_FILE).chmod(0o644)


def init_draft(
    policy_config: dict[str, Any],
    draft_vocab_ids: Tensor | None,
    *,
    lm_head: Tensor,
    final_norm: Tensor,
    aux_layer_ids: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    seed: int = 0,
) -> Eagle3Head:
    """A new head for a policy: random layer, the policy's output rows and final norm.

    Args:
        policy_config: the policy's ``config.json``.
        draft_vocab_ids: int [draft_vocab], ascending target ids; None for the full vocabulary.
        lm_head: [vocab, H], the policy's.
        final_norm: [H], the policy's final norm.
        aux_layer_ids: auxiliary layers ("after L layers"); vLLM's default if None.
        intermediate_size: width of the MLP; the policy's if None.
        seed: of the random weights.

    Returns:
        The head, float32. ``fc`` starts as the mean of the auxiliary states, so that the layer
        sees hidden states of the policy's own scale from the first step.
    """
    hidden = int(policy_config["hidden_size"])
    heads = int(policy_config["num_attention_heads"])
    vocab = int(policy_config["vocab_size"])
    rope = policy_config.get("rope_parameters") or {}
    config = HeadConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=intermediate_size or int(policy_config["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(policy_config.get("num_key_value_heads") or heads),
        head_dim=int(policy_config.get("head_dim") or hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=vocab if draft_vocab_ids is None else len(draft_vocab_ids),
        aux_layer_ids=aux_layer_ids or default_aux_layers(int(policy_config["num_hidden_layers"])),
        rms_norm_eps=float(policy_config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", policy_config.get("rope_theta", 10000.0))),
        max_position_embeddings=int(policy_config["max_position_embeddings"]),
    )
    rows = lm_head
    if draft_vocab_ids is not None:
        check_draft_vocabulary(draft_vocab_ids, config, "draft_vocab_ids")
        rows = lm_head[draft_vocab_ids.long()]
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(config, draft_vocab_ids)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        mean = torch.eye(hidden).repeat(1, config.num_aux_layers) / config.num_aux_layers
        head.fc.weight.mul_(0.1).add_(mean)
        head.lm_head.weight.copy_(rows)
        head.norm.weight.copy_(final_norm)
    return head


def target_ids(d2t: Tensor) -> Tensor:
    """int64 [draft_vocab]: the target id of every draft id."""
    return torch.arange(len(d2t), device=d2t.device) + d2t.long()


def d2t_of(draft_vocab_ids: Tensor) -> Tensor:
    """int64 [draft_vocab]: the inverse of ``target_ids``."""
    return draft_vocab_ids.long() - torch.arange(len(draft_vocab_ids))


def check_draft_vocabulary(ids: Tensor, config: HeadConfig, field: str) -> None:
    """Raise RefusedError unless the target ids ascend strictly within the vocabulary."""
    right_size = ids.shape == (config.draft_vocab_size,)
    if not right_size or ids[0] < 0 or ids[-1] >= config.vocab_size or (ids.diff() <= 0).any():
        raise _refused(
            f"{field}: draft vocabulary",
            f"{list(ids.shape)} ids, {ids[:4].tolist()} ...",
            f"{config.draft_vocab_size} strictly ascending ids below {config.vocab_size}",
        )


_DROP_EMBED = "remove embed_tokens.weight from the checkpoint; vLLM then uses the policy's"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _refused(path, str(error), "a JSON object") from error
    if not isinstance(config, dict):
        raise _refused(path, type(config).__name__, "a JSON object")
    return config


def _refused(
    field: object,
    found: object,
    expected: object,
    next_step: str = "give an EAGLE-3 draft checkpoint in the layout that vLLM loads",
) -> RefusedError:
    return RefusedError(str(field), found, expected, next_step)
