"""Seconds of engine steps: measured, or estimated from a model's shape and an accelerator.

Nothing here imports torch or gRPC. The roofline is arXiv 2606.18967's: the larger of memory and
compute time, and an overhead for each request.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import RefusedError

COLUMNS = ("batch_size", "num_draft_tokens", "step_seconds")

OFF = -1
"""The draft length of a step without speculation: no draft runs. 0 is vLLM's own zero, in a table
that has other lengths: the draft runs once, to keep its KV cache filled."""


class Costs(Protocol):
    """Seconds of engine steps."""

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """The k that have a cost, ascending, ``OFF`` among them."""

    def seconds(self, k: int, batch: float, context: float) -> float:
        """Seconds of one step of ``batch`` requests, each with k drafted tokens and ``context``
        tokens of past. Raises RefusedError where no cost is known."""


@dataclass(frozen=True)
class StepTable:
    """Measured steps; linear between the batch sizes that were measured.

    A step of fewer requests than the smallest measured one is taken to cost what that one costs.
    Steps of more than the largest are unknown. The context length is that of the measurements.

    Attributes:
        points: by draft length, (requests, seconds) ascending in requests.
    """

    points: Mapping[int, tuple[tuple[float, float], ...]]

    @classmethod
    def of(cls, rows: Iterable[tuple[float, int, float]], noise: float = 0.05) -> StepTable:
        """Make a table of (requests, drafted tokens, seconds), as in ``COLUMNS``: 0 is without
        speculation.

        Args:
            noise: a larger step may be cheaper than a smaller one by this share; it is then taken
                to cost the same.

        Raises:
            RefusedError: a cost is not positive, a row appears twice, plain steps (k = 0) are
                missing, or a step of more requests is cheaper by more than ``noise``.
        """
        found: dict[int, dict[float, float]] = {}
        for batch, k, seconds in rows:
            where = f"batch_size {batch:g}, num_draft_tokens {k}"
            if not (batch >= 1 and k >= 0 and math.isfinite(seconds) and seconds > 0):
                raise RefusedError(
                    "step costs",
                    f"{where}: {seconds:g} s",
                    "batch sizes from 1, draft lengths from 0, positive seconds",
                    "measure that row again, or leave it out",
                )
            if batch in found.setdefault(k, {}):
                raise RefusedError("step costs", f"{where} twice", "each row once", "keep one")
            found[k][batch] = seconds
        if 0 not in found:
            raise RefusedError(
                "step costs",
                f"draft lengths {sorted(found)}",
                "plain steps (num_draft_tokens 0) among them",
                "measure steps without speculation too: break-even is relative to them",
            )
        points = {}
        for k in sorted(found):
            highest = 0.0
            kept = []
            for batch in sorted(found[k]):
                seconds = found[k][batch]
                if seconds < highest * (1 - noise):
                    raise RefusedError(
                        "step costs",
                        f"{batch:g} requests, k = {k}: {seconds:g} s, fewer cost {highest:g} s",
                        f"costs that do not fall with the batch by more than {noise:.0%}",
                        "measure again on an idle machine, or accept it with --step-noise",
                    )
                highest = max(highest, seconds)
                kept.append((batch, highest))
            points[k or OFF] = tuple(kept)
        return cls(points)

    @classmethod
    def measured(cls, rows: Iterable[tuple[float, int, float, float]]) -> StepTable:
        """Make a table of (requests, k, mean seconds, steps), each pair of requests and k once.

        The costs of each k are the rising ones that are nearest to the measured: neighbours that
        fall are replaced by their mean, weighted by steps, so that a few slow steps of a small
        batch do not raise the cost of every larger one.

        Source: pool adjacent violators, doi:10.1214/aoms/1177728423.
        """
        points: dict[int, tuple[tuple[float, float], ...]] = {}
        by_length: dict[int, list[tuple[float, float, float]]] = {}
        for requests, k, seconds, steps in rows:
            by_length.setdefault(k, []).append((requests, seconds, steps))
        for k, found in by_length.items():
            pools: list[tuple[float, float, list[float]]] = []  # seconds, steps, batches
            for requests, cost, weight in sorted(found):
                batches = [requests]
                while pools and pools[-1][0] > cost:
                    before, steps, members = pools.pop()
                    cost = (before * steps + cost * weight) / (steps + weight)
                    weight, batches = steps + weight, members + batches
                pools.append((cost, weight, batches))
            points[k] = tuple((n, cost) for cost, _, batches in pools for n in batches)
        return cls(points)

    @classmethod
    def read(cls, path: Path, noise: float = 0.05) -> StepTable:
        """Read a CSV file with the columns ``COLUMNS``. Raises RefusedError."""
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                columns = reader.fieldnames or ()
                lines = [(reader.line_num, row) for row in reader]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            found, step = f"{error} ({path})", "check path and encoding"
            raise RefusedError("step costs", found, "a CSV file in UTF-8", step) from error
        if not set(COLUMNS) <= set(columns):
            expected = ", ".join(COLUMNS)
            raise RefusedError(f"{path}", f"columns {list(columns)}", expected, "add them")
        rows = []
        for number, row in lines:
            try:
                batch, k, seconds = (row[name] for name in COLUMNS)
                rows.append((float(batch), int(k), float(seconds)))
            except (TypeError, ValueError) as error:
                raise RefusedError(
                    f"{path}:{number}", f"{row}", "three numbers", "mend that line"
                ) from error
        return cls.of(rows, noise)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """The measured k."""
        return tuple(self.points)

    def seconds(self, k: int, batch: float, context: float = 0.0) -> float:
        """See ``Costs``. Whatever was measured, vLLM's zero costs at least as much as a step
        without speculation: it is such a step in which the draft runs too."""
        seconds = self._timed(k, batch)
        return max(seconds, self._timed(OFF, batch)) if k == 0 else seconds

    def _timed(self, k: int, batch: float) -> float:
        points = self.points.get(k)
        if points is None:
            raise RefusedError(
                "draft length", k, f"one of {list(self.points)}", "measure steps of that length"
            )
        if batch > points[-1][0]:
            raise RefusedError(
                "batch size",
                f"{batch:g}",
                f"at most {points[-1][0]:g}, the largest measured "
                + ("without speculation" if k == OFF else f"at k = {k}"),
                "measure steps of that many requests",
            )
        low = points[0]
        for high in points:
            if batch <= high[0]:
                if high is low:
                    return high[1]
                share = (batch - low[0]) / (high[0] - low[0])
                return low[1] + share * (high[1] - low[1])
            low = high
        raise AssertionError("unreachable: batch is at most the last point's")


@dataclass(frozen=True)
class Hardware:
    """One accelerator, by its data sheet.

    Attributes:
        flops: dense bfloat16 operations a second.
        bandwidth: bytes a second from device memory.
    """

    name: str
    flops: float
    bandwidth: float


HARDWARE = {
    h.name: h
    for h in (
        Hardware("A100", 312e12, 2.039e12),
        Hardware("H20", 148e12, 4.0e12),
        Hardware("H100", 989.5e12, 3.35e12),
        Hardware("H200", 989.5e12, 4.8e12),
        Hardware("B200", 2250e12, 8.0e12),
        Hardware("GB200", 2500e12, 8.0e12),
    )
}


def hardware(name: str) -> Hardware:
    """The accelerator of that name. Raises RefusedError."""
    try:
        return HARDWARE[name.upper()]
    except KeyError:
        raise RefusedError(
            "--gpu",
            name,
            f"one of {', '.join(HARDWARE)}",
            "take the nearest one, or measure steps and give --step-costs",
        ) from None


@dataclass(frozen=True)
class ModelShape:
    """The bytes that a step of a model reads, and its operations, on one accelerator.

    Attributes:
        dense_bytes: weights that every step reads.
        expert_bytes: weights of all routed experts; a step reads those that its tokens choose.
        token_flops: operations a token, without attention to the past.
        context_flops: operations a token and token of past.
        context_bytes: of KV cache a token of past.
        experts: routed experts a layer; ``experts_per_token`` of them compute a token.
        layers: decoder layers.
    """

    dense_bytes: float
    token_flops: float
    context_bytes: float = 0.0
    context_flops: float = 0.0
    expert_bytes: float = 0.0
    experts: int = 1
    experts_per_token: int = 1
    layers: int = 1

    def step_bytes(self, tokens: float, context_tokens: float) -> float:
        """Bytes that a step of that many tokens reads; experts are drawn evenly."""
        untouched = (1 - self.experts_per_token / self.experts) ** tokens
        return (
            self.dense_bytes
            + self.expert_bytes * (1 - untouched)
            + self.context_bytes * context_tokens
        )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OTHER_ATTENTION = ("kv_lora_rank", "linear_num_key_heads", "linear_attn_config", "mamba_d_state")
"""Fields of latent attention, and of layers that keep a state in place of a KV cache."""


def policy_shape(config: Mapping[str, Any], gpus: int = 1, weight_bytes: float = 2.0) -> ModelShape:
    """A decoder's shape on one of ``gpus`` tensor-parallel accelerators.

    Args:
        config: Hugging Face's config.json, dense or with routed experts; ``text_config`` is read.
        gpus: accelerators that share weights and KV cache evenly, but for KV heads, of which each
            has at least one; what they send one another is not counted.
        weight_bytes: of a weight: 2 for bfloat16, 1 for FP8.

    Raises:
        RefusedError: a size is missing, or attention is not multi-head or grouped-query attention
            in every layer.
    """
    config = config.get("text_config", config)
    other = [name for name in _OTHER_ATTENTION if config.get(name)]
    if other:
        raise RefusedError(
            "--policy",
            f"a config with {other[0]}",
            "multi-head or grouped-query attention in every layer",
            "use step costs that were measured: --server or --step-costs",
        )

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            found = config.get(name)
            if isinstance(found, int):
                return found
            if found is not None:
                raise RefusedError(
                    "--policy", f"{name}: {found}", "one number", "use --server or --step-costs"
                )
        if default is None:
            raise RefusedError(
                "--policy", f"no {names[0]}", "a decoder's config.json", "name the policy's own"
            )
        return default

    hidden, layers = size("hidden_size"), size("num_hidden_layers")
    heads = size("num_attention_heads")
    kv_heads = size("num_key_value_heads", default=heads)
    head = size("head_dim", default=hidden // heads)
    experts = size(*_EXPERTS, default=1)
    chosen = size("num_experts_per_tok", "moe_k", default=1)
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    output = hidden * size("vocab_size")
    if experts > 1:
        width = size("moe_intermediate_size", "intermediate_size")
        shared = width * size("n_shared_experts", "moe_num_shared_experts", default=0)
        shared = size("shared_expert_intermediate_size", default=shared)
        mlp = 3 * hidden * width
        dense = layers * (attention + 3 * hidden * shared) + output
        routed = layers * experts * mlp
        active = dense + layers * chosen * mlp
    else:
        mlp = 3 * hidden * size("intermediate_size")
        dense, routed = layers * (attention + mlp) + output, 0
        active = dense
    return ModelShape(
        dense_bytes=dense * weight_bytes / gpus,
        token_flops=2 * active / gpus,
        # vLLM replicates KV heads of which there are fewer than accelerators.
        context_bytes=2 * 2 * layers * max(1, kv_heads / gpus) * head,
        context_flops=4 * layers * heads * head / gpus,
        expert_bytes=routed * weight_bytes / gpus,
        experts=experts,
        experts_per_token=chosen,
        layers=layers,
    )


def eagle3_shape(config: Mapping[str, Any], draft_vocabulary: int, gpus: int = 1) -> ModelShape:
    """An EAGLE-3 draft of the policy with that config, in bfloat16: one layer that reads twice the
    hidden size, its MLP as wide as ``intermediate_size``, and lm_head. Raises RefusedError."""
    text = dict(config.get("text_config", config))
    layer = policy_shape(text | {"num_hidden_layers": 1, "vocab_size": 0, "num_experts": 1}, gpus)
    hidden = int(text["hidden_size"])
    head = int(text.get("head_dim") or hidden // int(text["num_attention_heads"]))
    heads = int(text["num_attention_heads"])
    kv_heads = int(text.get("num_key_value_heads") or heads)
    more = hidden * (head * (heads + 2 * kv_heads) + draft_vocabulary)
    return ModelShape(
        dense_bytes=layer.dense_bytes + 2 * more / gpus,
        token_flops=layer.token_flops + 2 * more / gpus,
        context_bytes=layer.context_bytes,
        context_flops=layer.context_flops,
    )


@dataclass(frozen=True)
class Roofline:
    """Steps estimated from a model's shape and an accelerator's data sheet.

    A pass takes (memory^q + compute^q)^(1/q) seconds, a maximum with the corner rounded off, and an
    overhead for each layer and each request: a pass of a small model costs its launches. The six
    figures are one least-squares fit of log seconds to steps of three models on an A100 (arXiv
    2606.18967, 685 cells) and of two on an H100 (vLLM's pull request 53060, 12 cells), in which
    each model counts the same; ``benchmarks.plan_published`` has the error for a model that is left
    out of the fit. The overheads of drafting are a fit to vLLM's pull request 20780, which has one
    policy, on an H100. Measured steps need none of this.

    Attributes:
        memory_share, compute_share: shares of the data sheet's figures that a pass reaches.
        corner: q.
        context_share: share of the KV cache's bytes that a pass pays for.
        layer_seconds: added for each layer.
        request_seconds: added for each request.
        draft_seconds: added for each draft pass.
        speculative_seconds: added once to a step in which the draft runs.
    """

    hardware: Hardware
    policy: ModelShape
    draft: ModelShape
    draft_lengths: tuple[int, ...] = (OFF, 0, 1, 2, 3, 4, 5, 6, 7)
    memory_share: float = 0.800
    compute_share: float = 0.821
    corner: float = 1.54
    context_share: float = 0.741
    layer_seconds: float = 40.9e-6
    request_seconds: float = 17.2e-6
    draft_seconds: float = 0.71e-3
    speculative_seconds: float = 1.31e-3

    def forward(self, shape: ModelShape, batch: float, tokens: int, context: float) -> float:
        """Seconds of a pass over ``tokens`` new tokens of each request, without what each request
        and each draft adds."""
        read = shape.step_bytes(batch * tokens, self.context_share * batch * context)
        flops = batch * tokens * (shape.token_flops + context * shape.context_flops)
        memory = read / (self.memory_share * self.hardware.bandwidth)
        compute = flops / (self.compute_share * self.hardware.flops)
        busy = (memory**self.corner + compute**self.corner) ** (1 / self.corner)
        return float(self.layer_seconds * shape.layers + busy)

    def seconds(self, k: int, batch: float, context: float) -> float:
        """See ``Costs``."""
        tokens = max(k, 0) + 1
        step = self.forward(self.policy, batch, tokens, context) + self.request_seconds * batch
        if k != OFF:
            draft = self.forward(self.draft, batch, 1, context) + self.draft_seconds
            step += max(k, 1) * draft + self.speculative_seconds
        return step


FITTED_GPUS = ("A100", "H100")
FITTED_WEIGHTS = (6e9, 15e9)
FITTED_REQUESTS = 64
"""The policies and batches for which ``Roofline`` was compared with published steps and drafts."""


def beyond_fit(
    gpu: Hardware, policy: ModelShape, gpus: int, weight_bytes: float, requests: int
) -> list[str]:
    """Say in which respects an estimate is a guess; none where it was compared with measurements.

    Args:
        gpu: the accelerator.
        policy: its shape on one of ``gpus`` of them, as ``policy_shape`` makes it.
        gpus: tensor-parallel accelerators.
        weight_bytes: of a weight.
        requests: the most in a step.
    """
    weights = policy.dense_bytes * gpus / weight_bytes
    low, high = FITTED_WEIGHTS
    found = {
        f"a policy of {weights / 1e9:.2g} billion weights a step": not low <= weights <= high,
        f"{policy.experts} experts": policy.experts > 1,
        f"weights of {weight_bytes:g} bytes": weight_bytes != 2,
        f"{gpus} GPUs": gpus > 1,
        gpu.name: gpu.name not in FITTED_GPUS,
        f"{requests} requests": requests > FITTED_REQUESTS,
    }
    return [what for what, beyond in found.items() if beyond]
