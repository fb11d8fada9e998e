"""Rotary frequencies of a draft, scaled as vLLM scales them.

Source: vLLM 0.32, ``model_executor/layers/rotary_embedding`` (llama3, linear, dynamic, YaRN), in
float32 and in its order of operations, so that the angles are those of the serving side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

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
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies, by the names of ``rope_parameters``.

    Attributes:
        kind: "linear", "dynamic", "llama3" or "yarn".
        values: its parameters, sorted by name; optional ones only where they were given.
    """

    kind: str
    values: tuple[tuple[str, float], ...]

    def __getitem__(self, name: str) -> float:
        return dict(self.values)[name]

    def get(self, name: str, default: float) -> float:
        """A parameter, or ``default`` where it was not given."""
        return dict(self.values).get(name, default)


@dataclass(frozen=True)
class Rope:
    """What a config.json says about rotary embeddings.

    Attributes:
        theta: the base.
        scaling: None for plain frequencies.
        partial_rotary_factor: share of each head that is rotated.
    """

    theta: float
    scaling: RopeScaling | None
    partial_rotary_factor: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Rope:
        """Read ``rope_scaling``, ``rope_parameters`` and the top-level fields as vLLM does.

        Transformers 5, which parses the file for vLLM, prefers ``rope_scaling`` where both are
        given, takes a base that it lacks from the top level, and fills in the original length.

        Raises:
            RefusedError: an unknown kind or parameter, a missing one, or two bases.
        """
        field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = dict(config.get(field) or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if given.get("type", kind) != kind:
            _refuse(f"{field}.type", given["type"], f"{kind}, as rope_type says")
        if kind != "default" and kind not in _REQUIRED:
            _refuse(f"{field}.rope_type", kind, f"default or one of {sorted(_REQUIRED)}")
        if kind in ("llama3", "yarn"):
            name = "original_max_position_embeddings"
            length = config.get(name, given.get(name, config.get("max_position_embeddings")))
            given[name] = length
        known = (*_REQUIRED.get(kind, ()), *_OPTIONAL.get(kind, ()))
        unknown = sorted(given.keys() - {*known, *_COMMON})
        if unknown:
            _refuse(f"{field}.{unknown[0]}", given[unknown[0]], f"none for rope_type {kind}")
        values = []
        for name in sorted(known):
            value = given.get(name)
            if value is None and name not in _REQUIRED[kind]:
                continue
            if not isinstance(value, int | float):
                _refuse(f"{field}.{name}", value, f"a number, for rope_type {kind}")
            values.append((name, value))
        return cls(
            theta=_theta(config, given, field),
            scaling=None if kind == "default" else RopeScaling(kind, tuple(values)),
            partial_rotary_factor=_partial(config, given, field),
        )

    def to_dict(self) -> dict[str, Any]:
        """``rope_parameters`` of transformers 5."""
        written: dict[str, Any] = {"rope_type": "default", "rope_theta": self.theta}
        if self.scaling is not None:
            written |= {"rope_type": self.scaling.kind, **dict(self.scaling.values)}
            # vLLM takes a whole number for a list of factors, and fails.
            written["factor"] = float(written["factor"])
        if self.partial_rotary_factor != 1.0:
            written["partial_rotary_factor"] = self.partial_rotary_factor
        return written

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """float32 [rotary_dim / 2]: radians per position of every rotated pair."""
        dim = self.rotary_dim(head_dim)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        scaling = self.scaling
        if scaling is None:
            return 1.0 / self.theta**exponents
        if scaling.kind == "linear":
            return 1.0 / self.theta**exponents / scaling["factor"]
        if scaling.kind == "dynamic":
            # Without alpha, vLLM's base for the trained length is the plain one.
            return 1.0 / (self.theta * scaling.get("alpha", 1.0) ** (dim / (dim - 2))) ** exponents
        if scaling.kind == "llama3":
            return _llama3(1.0 / self.theta**exponents, scaling)
        return _yarn(self.theta**exponents, scaling, self.theta)

    def attention_scale(self) -> float:
        """What cos and sin are multiplied with (YaRN's mscale)."""
        scaling = self.scaling
        if scaling is None or scaling.kind != "yarn":
            return 1.0
        given = dict(scaling.values)
        if "attention_factor" in given:
            return float(given["attention_factor"])
        if given.get("mscale") and given.get("mscale_all_dim"):
            return _mscale(given["factor"], given["mscale"]) / _mscale(
                given["factor"], given["mscale_all_dim"]
            )
        return _mscale(given["factor"], 1.0)

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's elements are rotated, the first ones."""
        return int(head_dim * self.partial_rotary_factor)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (length / wavelengths - low) / (high - low) if low != high else 0.0
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    stretched = torch.where(wavelengths > length / low, frequencies / factor, blended)
    return torch.where(wavelengths < length / high, frequencies, stretched)


def _yarn(periods: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: a ramp from kept to divided frequencies."""
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    dim = 2 * len(periods)

    def pair_with_rotations(times: float) -> float:
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_with_rotations(scaling.get("beta_fast", 32))
    last = pair_with_rotations(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _theta(config: Mapping[str, Any], given: Mapping[str, Any], field: str) -> float:
    theta = given.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 0:
        _refuse("rope_theta", theta, "the rotary base, in rope_parameters or at top level")
    if config.get("rope_theta") not in (None, theta):
        _refuse("rope_theta", config["rope_theta"], f"{theta}, as {field}.rope_theta says")
    return float(theta)


def _partial(config: Mapping[str, Any], given: Mapping[str, Any], field: str) -> float:
    factor = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if factor is None:
        return 1.0
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        _refuse(f"{field}.partial_rotary_factor", factor, "above 0 and at most 1")
    return float(factor)


def _refuse(name: str, found: object, expected: object) -> NoReturn:
    raise RefusedError(
        f"config.json {name}", found, expected, "use a draft with a rope that is listed here"
    )
