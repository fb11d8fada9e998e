"""Reads sizes, lm_head and final norm of a policy's Hugging Face checkpoint for a new draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import RefusedError
from slipstream.hub import read_json

MOST_SIZE, MOST_LAYERS = 1 << 24, 1 << 10
"""Far above any model's, and far below what exhausts memory."""

_ADVICE = "give the model's folder as Hugging Face save_pretrained writes it"
_PREFIXES = ("", "model.", "model.language_model.", "language_model.", "language_model.model.")


@dataclass(frozen=True, eq=False)
class PolicyCheckpoint:
    """A policy on disk.

    Attributes:
        config: of the language model: ``config.json``, or its ``text_config``.
        lm_head: [vocab, H], memory-mapped.
        final_norm: [H].
    """

    config: dict[str, Any]
    lm_head: Tensor
    final_norm: Tensor


def read_policy(directory: Path) -> PolicyCheckpoint:
    """Read a policy as Hugging Face saves it: config.json and one or more safetensors files.

    Raises:
        RefusedError: a file is missing or unreadable, or a tensor is missing or misshapen.
    """
    config = read_policy_config(directory)
    vocab, hidden = (size_of(config, name) for name in ("vocab_size", "hidden_size"))
    files = _tensor_files(directory)
    heads = ["lm_head.weight"]
    if config.get("tie_word_embeddings"):
        heads.append("embed_tokens.weight")
    return PolicyCheckpoint(
        config,
        _tensor(directory, files, heads, [vocab, hidden]),
        _tensor(directory, files, ("norm.weight",), [hidden]),
    )


def read_policy_config(directory: Path) -> dict[str, Any]:
    """The language model's part of a policy's config.json. Raises as ``read_policy``."""
    path = directory / "config.json"
    config = read_json(path, _ADVICE)
    for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "speculators_model_type"):
        if name in config:
            raise _refused(str(path), f"{name}, so a draft", "the policy itself")
    text_config = config.get("text_config", config)
    return text_config if isinstance(text_config, dict) else config


def read_embeddings(directory: Path) -> Tensor:
    """A policy's input embeddings [vocab, H], memory-mapped. Raises as ``read_policy``."""
    config = read_policy_config(directory)
    shape = [size_of(config, "vocab_size"), size_of(config, "hidden_size")]
    return _tensor(directory, _tensor_files(directory), ("embed_tokens.weight",), shape)


def size_of(config: Mapping[str, Any], name: str, whose: str = "the policy's") -> int:
    """A positive whole number of a config.json. Raises RefusedError where it is not one."""
    value, most = config.get(name), MOST_LAYERS if name == "num_hidden_layers" else MOST_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _refused(f"{whose} config.json {name}", value, f"a whole number from 1 to {most}")
    return value


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor, by the tensor's name."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise _refused(str(path), error, "a safetensors file") from error
    return found


def _tensor(
    directory: Path, files: Mapping[str, Path], names: Sequence[str], shape: list[int]
) -> Tensor:
    for name in (prefix + name for name in names for prefix in _PREFIXES):
        if name in files:
            with safe_open(files[name], "pt") as file:
                tensor = file.get_tensor(name)
            if list(tensor.shape) != shape or not tensor.is_floating_point():
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise _refused(f"{files[name]}: {name}", found, f"floating point {shape}")
            return tensor
    raise _refused(
        str(directory), f"{len(files)} tensors, no {' or '.join(names)}", "the policy's weights"
    )


def _refused(field: str, found: object, expected: str) -> RefusedError:
    return RefusedError(field, found, expected, _ADVICE)
