"""Reads the parts of a policy's Hugging Face checkpoint that a draft needs; refuses wrong fields.

``slipstream.checkpoints`` reads any checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from slipstream.checkpoints import CONFIG_FILE, load_tensors, read_layout, text_config
from slipstream.errors import RefusedError
from slipstream.hub import read_json
from slipstream.layers import AUX_LAYERS

MOST_SIZE, MOST_LAYERS = 1 << 24, 1 << 10
"""The bounds on a config.json's sizes: far above any model's, far below what exhausts memory."""

_ADVICE = "give the model's folder as Hugging Face save_pretrained writes it"
_TIED = "tie_word_embeddings"
_PREFIXES = (
    *("", "model.", "model.language_model.", "language_model.", "language_model.model."),
    *("backbone.", "gpt_neox."),
)
# Most policies' first; then Nemotron-H's, LFM2's, Phi-2's and Falcon-H1's, GPT-NeoX's.
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "embed_in.weight")
_NORMS = (
    *("norm.weight", "norm_f.weight", "embedding_norm.weight", "final_layernorm.weight"),
    "final_layer_norm.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class Refuse:
    """Raises RefusedError for a field of one kind of file.

    Attributes:
        file: the file in words; a field's name follows it.
        next_step: the next step of a refusal that names no other.
    """

    file: str
    next_step: str

    def __call__(
        self, name: str, found: object, expected: object, next_step: str | None = None
    ) -> NoReturn:
        """Refuse a field."""
        field = f"{self.file} {name}"
        raise RefusedError(field, found, expected, next_step or self.next_step)

    def other_values(
        self,
        config: Mapping[str, Any],
        allowed: Mapping[str, tuple[Any, ...]],
        prefix: str = "",
    ) -> None:
        """Refuse the first field that has none of its allowed values; an absent one has None.

        Args:
            config: the file, or an object in it.
            allowed: values by field; a refusal names the first.
            prefix: the dotted path to ``config`` in the file.
        """
        for name, values in allowed.items():
            if config.get(name) not in values:
                self(f"{prefix}{name}", config.get(name), values[0])


@dataclass(frozen=True, eq=False)
class PolicyCheckpoint:
    """A policy on disk.

    Attributes:
        config: of the language model: ``config.json``, or what it nests.
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
    names = read_layout(directory).keys()
    heads = (*_HEADS, *(_EMBEDDINGS if config[_TIED] else ()))
    return PolicyCheckpoint(
        config,
        _tensor(directory, names, heads, [vocab, hidden]),
        _tensor(directory, names, _NORMS, [hidden]),
    )


def read_policy_config(directory: Path) -> dict[str, Any]:
    """Read the language model's part of a policy's config.json, with whether lm_head may be tied.

    Raises as ``read_policy``.
    """
    path = directory / CONFIG_FILE
    config = read_json(path, _ADVICE)
    of_drafts = ("draft_vocab_size", "speculators_model_type", "dflash_config", "markov_rank")
    for name in (*of_drafts, AUX_LAYERS):
        if name in config:
            raise _refused(str(path), f"{name}, so a draft", "the policy itself")
    found = dict(text_config(config))
    # transformers writes the field beside the language model's part, or not at all where it is the
    # default of the model's class: then the tensors decide.
    said = [part[_TIED] for part in (config, found) if part.get(_TIED) is not None]
    found[_TIED] = any(said) or not said
    return found


def read_embeddings(directory: Path) -> Tensor:
    """Read a policy's input embeddings [vocab, H], memory-mapped. Raises as ``read_policy``."""
    config = read_policy_config(directory)
    shape = [size_of(config, "vocab_size"), size_of(config, "hidden_size")]
    return _tensor(directory, read_layout(directory).keys(), _EMBEDDINGS, shape)


def size_of(config: Mapping[str, Any], name: str, whose: str = "the policy's") -> int:
    """Return a positive whole number of a config.json. Raises RefusedError if it is not one."""
    value, most = config.get(name), MOST_LAYERS if name == "num_hidden_layers" else MOST_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _refused(f"{whose} config.json {name}", value, f"a whole number from 1 to {most}")
    return value


def _tensor(
    directory: Path, held: Collection[str], names: Sequence[str], shape: list[int]
) -> Tensor:
    for name in (prefix + name for name in names for prefix in _PREFIXES):
        module = name.removesuffix("weight")
        if any(other.startswith(module) for other in held):
            # The whole module: what is not its plain weight, under whatever name, is refused there.
            tensor = load_tensors(directory, module).get(name)
            if tensor is None or list(tensor.shape) != shape or not tensor.is_floating_point():
                found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise _refused(f"{directory}: {name}", found, f"floating point {shape}")
            return tensor
    raise _refused(
        str(directory), f"{len(held)} tensors, no {' or '.join(names)}", "the policy's weights"
    )


def _refused(field: str, found: object, expected: str) -> RefusedError:
    return RefusedError(field, found, expected, _ADVICE)
