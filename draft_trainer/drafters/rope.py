"""The rotary embedding of a draft, its frequencies scaled as vLLM scales them.

Source: vLLM 0.32, ``model_executor/layers/rotary_embedding`` (llama3, linear, dynamic, YaRN), in
float32 and in its order of operations, so that the angles are those of the serving side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_trainer.checkpoints import Refuse
from draft_trainer.drafters.ops import rotate_heads
from slipstream.errors import RefusedError

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {
    "dynamic": ("alpha",),
    "yarn": (
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        "truncate",
    ),
}
_UNUSED = {
    "attn_factor": "nobody reads it; DeepSeek-R1-0528-Qwen3-8B has it",
    "finetuned": "it says how YaRN's authors trained",
    "extrapolation_factor": "neither vLLM nor transformers passes it on to YaRN",
}
"""Parameters that change no number, each with the reason. Any other that is unknown is refused, as
it may change some, or be the wrong name of one that does."""

_NAMES = frozenset(
    # A kind ignores those of others: HunYuan's dynamic one has YaRN's beside its own.
    name
    for names in (*_REQUIRED.values(), *_OPTIONAL.values())
    for name in names
).union(_UNUSED, ("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_POLICY_KINDS = (
    *("longrope", "su", "proportional", "ntk", "mllama4", "bailing_mrope", "openpangu"),
    *("deepseek_yarn", "deepseek_llama_scaling"),
)
"""Kinds that vLLM serves policies with, and no draft has."""

_MROPE = ("mrope_section", "mrope_interleaved")
_refuse = Refuse("config.json", "use a draft with a rope that is listed here")


@dataclass(frozen=True)
class Rope:
    """The rotary embedding that a config.json describes, by the names of ``rope_parameters``.

    Attributes:
        theta: the base.
        kind: "default", "linear", "dynamic", "llama3" or "yarn".
        values: the kind's parameters, sorted by name; optional ones only where they were given.
        partial: share of each head that is rotated.
    """

    theta: float = 10000.0
    kind: str = "default"
    values: tuple[tuple[str, float], ...] = ()
    partial: float = 1.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Rope:
        """Read ``rope_scaling``, ``rope_parameters`` and the top-level fields as vLLM does.

        Transformers 5, which parses the file for vLLM, prefers ``rope_scaling`` where both are
        given, takes a base that it lacks from the top level, and fills in the original length.

        Raises:
            RefusedError: an unknown kind or parameter, a missing one, or two bases.
        """
        field, found = _given(config)
        given = dict(found)
        kind = given.get("rope_type", given.get("type", "default"))
        if given.get("type", kind) != kind:
            _refuse(f"{field}.type", given["type"], f"{kind}, as rope_type says")
        if kind != "default" and kind not in _REQUIRED:
            _refuse(f"{field}.rope_type", kind, f"default or one of {sorted(_REQUIRED)}")
        if kind in ("llama3", "yarn"):
            name = "original_max_position_embeddings"
            length = config.get(name, given.get(name, config.get("max_position_embeddings")))
            given[name] = length
        required = _REQUIRED.get(kind, ())
        known = (*required, *_OPTIONAL.get(kind, ()))
        unknown = sorted(given.keys() - _NAMES)
        if unknown:
            _refuse(f"{field}.{unknown[0]}", given[unknown[0]], f"none for rope_type {kind}")
        values: dict[str, Any] = {
            n: given.get(n) for n in known if n in required or given.get(n) is not None
        }
        for name, value in sorted(values.items()):
            if not isinstance(value, int | float):
                _refuse(f"{field}.{name}", value, f"a number, for rope_type {kind}")
        theta = given.get("rope_theta", config.get("rope_theta"))
        if not isinstance(theta, int | float) or theta <= 0:
            _refuse("rope_theta", theta, "the rotary base, in rope_parameters or at top level")
        if config.get("rope_theta") not in (None, theta):
            _refuse("rope_theta", config["rope_theta"], f"{theta}, as {field}.rope_theta says")
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        partial = 1.0 if partial is None else partial
        if not isinstance(partial, int | float) or not 0 < partial <= 1:
            _refuse(f"{field}.partial_rotary_factor", partial, "above 0 and at most 1")
        return cls(float(theta), kind, tuple(sorted(values.items())), float(partial))

    @classmethod
    def of_policy(cls, config: Mapping[str, Any]) -> Rope:
        """The rope of a policy's text, whose tokens have one position in all multimodal sections.

        Raises as ``from_dict``, of the policy.
        """
        plain = dict(config)
        for field in ("rope_parameters", "rope_scaling"):
            if isinstance(given := config.get(field), Mapping):
                # "mrope" as a type is the default one in sections.
                kept = {n: v for n, v in given.items() if n not in _MROPE and v != "mrope"}
                plain[field] = kept
        try:
            return cls.from_dict(plain)
        except RefusedError as error:
            step = "write the draft's config.json by hand; it may have another rope"
            found = (f"the policy's {error.field}", error.found, error.expected)
            raise RefusedError(*found, step) from error

    @classmethod
    def of_draft(cls, policy: Mapping[str, Any]) -> tuple[Rope, str]:
        """Return the rope of a policy's new draft, and how it differs from the policy's, or "".

        Where the policy has a rope for each type of layer, it is that of full attention. Where no
        draft can have the policy's, it is a plain one with the same base, or vLLM's default base
        where the policy names none.

        Args:
            policy: the config.json of its language model.

        Raises as ``from_dict``.
        """
        (field, given), told = _given(policy), ""
        if isinstance(full := given.get("full_attention"), Mapping):
            policy, given, told = {**policy, field: full}, full, "rope of the full-attention layers"
        kind = given.get("rope_type", given.get("type"))
        bases = [part["rope_theta"] for part in (given, policy) if part.get("rope_theta")]
        if not given and not bases:
            # As in Nemotron-H, whose attention has no positions.
            return cls(), f"plain rope with base {cls.theta}, as the policy names none"
        if kind not in _POLICY_KINDS and "llama_4_scaling_beta" not in given:
            return cls.of_policy(policy), told
        base = {"rope_theta": bases[0] if bases else cls.theta}
        rope = cls.from_dict({"rope_theta": policy.get("rope_theta"), "rope_parameters": base})
        return rope, f"plain rope with base {rope.theta}, as no draft can have the policy's"

    def to_dict(self) -> dict[str, Any]:
        """``rope_parameters`` of transformers 5."""
        written: dict[str, Any] = {
            "rope_type": self.kind,
            "rope_theta": self.theta,
            **dict(self.values),
        }
        if "factor" in written:
            # vLLM mistakes an integer for a list of factors, and fails.
            written["factor"] = float(written["factor"])
        if self.partial != 1.0:
            written["partial_rotary_factor"] = self.partial
        return written

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """float32 [rotary_dim / 2]: radians per position of every rotated pair."""
        dim, given = self.rotary_dim(head_dim), dict(self.values)
        # On the CPU even where a module is built on the meta device: no checkpoint has them.
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        theta = self.theta
        if self.kind == "dynamic":
            # Without alpha, vLLM's base for the trained length is the plain one.
            theta *= given.get("alpha", 1.0) ** (dim / (dim - 2))
        if self.kind == "yarn":
            return _yarn(theta**exponents, given, theta)
        frequencies = 1.0 / theta**exponents
        if self.kind == "linear":
            return frequencies / given["factor"]
        return _llama3(frequencies, given) if self.kind == "llama3" else frequencies

    def attention_scale(self) -> float:
        """Return the factor of cos and sin (YaRN's mscale)."""
        given = dict(self.values)
        if self.kind != "yarn":
            return 1.0
        if "attention_factor" in given:
            return float(given["attention_factor"])
        if given.get("mscale") and given.get("mscale_all_dim"):
            return _mscale(given["factor"], given["mscale"]) / _mscale(
                given["factor"], given["mscale_all_dim"]
            )
        return _mscale(given["factor"], 1.0)

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many of a head's elements are rotated; they are the first ones."""
        return int(head_dim * self.partial)


class Rotary:
    """Rotates heads by their positions.

    Args:
        rope: the embedding.
        head_dim: size of one head.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        # Not a buffer of a module: ``to(bfloat16)`` must not round the angles.
        self.inverse_frequencies = rope.inverse_frequencies(head_dim)
        self._scale = rope.attention_scale()

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [B, T, 1, rotary_dim / 2] in ``dtype``, of positions [B, T]."""
        if self.inverse_frequencies.device != positions.device:
            # Moved once, because the host waits for the copy to a GPU.
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.to(dtype)[..., None, None] * self.inverse_frequencies.to(dtype)
        return angles.cos() * self._scale, angles.sin() * self._scale

    def __call__(self, x: Tensor, positions: Tensor, count: int | None = None) -> Tensor:
        """Heads [B, T, heads, D] with the first ``count`` of them rotated (None: all).

        The angles are in at least float32, the result in the type of ``x``.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        return rotate_heads(x, count or x.shape[2], *self.angles(positions, wide))


def _given(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The object of a config.json that describes its rope, and that object's name."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(field) or {}
    if not isinstance(given, Mapping):
        _refuse(field, given, "an object")
    return field, given


def _llama3(frequencies: Tensor, given: Mapping[str, float]) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, those between blended."""
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    length, factor = given["original_max_position_embeddings"], given["factor"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (length / wavelengths - low) / (high - low) if low != high else 0.0
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    stretched = torch.where(wavelengths > length / low, frequencies / factor, blended)
    return torch.where(wavelengths < length / high, frequencies, stretched)


def _yarn(periods: Tensor, given: Mapping[str, float], theta: float) -> Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: a ramp from kept to divided frequencies."""
    length, factor = given["original_max_position_embeddings"], given["factor"]
    dim = 2 * len(periods)

    def pair_with_rotations(times: float) -> float:
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_with_rotations(given.get("beta_fast", 32))
    last = pair_with_rotations(given.get("beta_slow", 1))
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    places = torch.arange(dim // 2, dtype=torch.float32, device=periods.device)
    ramp = ((places - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
