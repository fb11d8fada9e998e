"""The EAGLE-3 head: one decoder layer over embeddings and fused hidden states.

The function is that of vLLM 0.32 (``model_executor/models/llama_eagle3.py`` and, with ``qk_norm``,
``qwen3_eagle3.py``), the parameter names those of the checkpoints that it loads. The embeddings are
the policy's as a rule, and then not part of the head.

RMSNorm with a backward pass of its own: autograd's keeps six tensors where one number does.

Rotary embedding of several heads at once, in the NeoX layout: a head's halves are the pairs.

SwiGLU of a gate and an up projection that were made by one product.

Runs a module's computation on its parameters in another type.

Matrix products, by the fastest kernel that torch ships for the machine.

torch multiplies float32 matrices on a CPU with MKL, which on AMD's Zen 5 reaches 95 GFLOP/s a
core where oneDNN, which is in the same torch and multiplies its bfloat16 matrices, reaches 210.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.kernels.library import kernels_for
from draft_trainer.kernels.rows import (
    norm_backward,
    norm_forward,
    swiglu_backward,
    swiglu_forward,
)
from draft_trainer.kernels.rows import rotate as rotate_rows
from slipstream.errors import RefusedError


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean of squares in float32, as vLLM has it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size], in the type of ``x``."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class FrozenEmbedding(nn.Module):
    """Embeddings that are not trained: a buffer, which no optimizer moves or decays."""

    weight: Tensor

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(vocab_size, size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [...] to [..., size]."""
        return F.embedding(token_ids, self.weight)


class Attention(nn.Module):
    """Projections of the attention; where keys come from is the unroll's business."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, bias = 2 * config.hidden_size, config.attention_bias
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        # vLLM's Qwen3 attention has no output bias, whatever attention_bias says.
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias and not config.qk_norm)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values.

        Args:
            x: [B, T, 2 * H].
            cos: float32 [B, 1, T, rotary_dim / 2].
            sin: the same shape.

        Returns:
            q [B, heads, T, head_dim]; k and v [B, kv_heads, T, head_dim].
        """
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """The head's only layer (``midlayer`` in checkpoints)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(size, config.intermediate_size, config.mlp_bias)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input [..., 2 * H] and the residual [..., H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat([self.input_layernorm(embeds), normed], dim=-1), residual

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """From the attention's heads [B, heads, T, head_dim] to the pre-norm output [B, T, H]."""
        residual = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Head(nn.Module):
    """The trainable part of an EAGLE-3 draft. ``state_dict`` has the checkpoint's names.

    Args:
        config: its shape.
        draft_vocab_ids: int [draft_vocab], the target id of every draft id; None for the full
            vocabulary, and where nobody asks for acceptance.

    Attributes:
        embed_tokens: the head's own embeddings, frozen as in the trainers that they come from;
            None where the head takes the policy's.
    """

    draft_vocab_ids: Tensor | None

    def __init__(self, config: HeadConfig, draft_vocab_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_vocab_ids", draft_vocab_ids, persistent=False)
        size, eps, target = config.hidden_size, config.rms_norm_eps, config.target_hidden_size
        width = config.num_aux_layers * target
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(target, eps) for _ in config.aux_layer_ids)
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(width, size, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.embed_tokens = (
            FrozenEmbedding(config.vocab_size, size) if config.own_embeddings else None
        )
        # Not a buffer: ``head.to(bfloat16)`` must not coarsen the rotary angles.
        self._inv_freq = config.rope.inverse_frequencies(config.head_dim)
        self._attention_scale = config.rope.attention_scale()

    def fuse(self, aux: Tensor) -> Tensor:
        """The first step's hidden state, from the auxiliary states.

        Args:
            aux: [..., A * H_target], in the order of ``aux_layer_ids``, in the head's type.

        Returns:
            [..., H].
        """
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            states = aux.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
            aux = torch.cat(normed, dim=-1)
        return self.fc(aux)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [B, 1, T, rotary_dim / 2], of integer positions [B, T]."""
        inv_freq = self._inv_freq.to(positions.device, dtype)
        angles = positions.to(dtype)[:, None, :, None] * inv_freq
        return angles.cos() * self._attention_scale, angles.sin() * self._attention_scale

    def logits(self, output: Tensor) -> Tensor:
        """Draft-vocabulary logits [..., draft_vocab] of the layer's pre-norm output [..., H]."""
        return self.lm_head(self.norm(output))

    def draft_ids_of(self, token_ids: Tensor) -> Tensor:
        """Draft ids of target ids, -1 where a token is outside the draft vocabulary.

        Args:
            token_ids: int64, any shape.

        Raises:
            RefusedError: a reduced vocabulary whose ids the head was not given.
        """
        if self.config.full_vocabulary:
            return token_ids
        if self.draft_vocab_ids is None:
            raise RefusedError(
                "draft_vocab_ids",
                "nothing",
                f"the target ids of {self.config.draft_vocab_size} draft ids",
                "build the head with its draft vocabulary, for example by load_head",
            )
        ids = torch.full((self.config.vocab_size,), -1, device=token_ids.device)
        ids[self.draft_vocab_ids.long()] = torch.arange(
            self.config.draft_vocab_size, device=token_ids.device
        )
        return ids[token_ids]

    def check_window(self, tokens: int) -> None:
        """Refuse rows in which a query would see past the sliding window.

        Args:
            tokens: a row's length and the later TTT steps.

        Raises:
            RefusedError: the window is shorter; the unroll attends to all that came before.
        """
        window = self.config.sliding_window
        if window is not None and tokens > window:
            raise RefusedError(
                "sliding_window",
                f"{window}, for rows of {tokens} tokens (their TTT steps included)",
                "at least as many",
                "send shorter sequences, or a draft without a window",
            )

    def feedback(self, output: Tensor) -> Tensor:
        """What the next TTT step takes as its hidden state, [..., H]."""
        return self.norm(output) if self.config.norm_output else output


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the NeoX layout: the two halves of what is rotated are the pair.

    Args:
        x: [B, heads, T, head_dim]; elements from rotary_dim on are kept.
        cos: [B, 1, T, rotary_dim / 2].
        sin: the same shape.
    """
    turned, kept = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    first, second = turned.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), kept], dim=-1) if kept.shape[-1] else rotated.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight; the mean of squares in at least float32, as vLLM has it.

    Args:
        x: [..., size].
        weight: [size].
        eps: added to the mean of squares.

    Returns:
        [..., size], in the type of ``x``.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernels = _kernels_for(x, weight)
        if kernels is not None:
            out, scale = norm_forward(kernels, x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        kernels = _kernels_for(x, weight)
        if kernels is not None:
            wants = ctx.needs_input_grad[:2]
            return *norm_backward(kernels, x, weight, scale, grad, wants), None
        normed = x.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        # d/dx of x * scale: what points along x itself changes the length and nothing else.
        wide = wide * weight
        along = torch.linalg.vecdot(wide, normed).div_(x.shape[-1])[..., None]
        return wide.addcmul_(normed, along, value=-1.0).mul_(scale).to(x.dtype), grad_weight, None


def _kernels_for(x: Tensor, weight: Tensor) -> CDLL | None:
    return kernels_for(x) if x.dtype == weight.dtype else None


def rotate_heads(x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``count`` heads and pass the others on.

    Args:
        x: [B, T, heads, D].
        count: heads to rotate, for example the queries' and the keys' but not the values'.
        cos: [B, T, 1, R / 2], at least float32; elements of a head from R on are passed on too.
        sin: the same.

    Returns:
        [B, T, heads, D], in the type of ``x``.
    """
    return _RotateHeads.apply(x, count, cos, sin)


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.count = count
        ctx.save_for_backward(cos, sin)
        return _rotated(x, count, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, ctx.count, cos, sin, -1.0), None, None, None


def _rotated(x: Tensor, count: int, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    kernels = kernels_for(x)
    # The C kernel wants an angle for every row; the product may share one over the batch.
    if kernels is not None and cos.dtype == torch.float32 and cos.shape[:2] == x.shape[:2]:
        return rotate_rows(kernels, x, count, cos, sin, sign)
    sin = sin if sign > 0 else -sin
    out = torch.empty_like(x)
    width = 2 * cos.shape[-1]
    out[:, :, count:] = x[:, :, count:]
    out[:, :, :count, width:] = x[:, :, :count, width:]
    first, second = x[:, :, :count, :width].to(cos.dtype).chunk(2, dim=-1)
    to_first, to_second = out[:, :, :count, :width].chunk(2, dim=-1)
    to_first.copy_((first * cos).addcmul_(second, sin, value=-1.0))
    to_second.copy_((second * cos).addcmul_(first, sin))
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 * I] to [..., I].

    Its backward pass writes both halves of the gradient where the product wants them; autograd's
    makes each by itself and joins them, three passes more over the widest tensor of the layer.
    """
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        kernels = kernels_for(gate_up)
        if kernels is not None:
            return swiglu_forward(kernels, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        kernels = kernels_for(gate_up)
        if kernels is not None:
            return swiglu_backward(kernels, gate_up, grad)
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        to_gate, to_up = out.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return out


M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def computing_in(module: M, dtype: torch.dtype, work: Callable[[M], T]) -> T:
    """``work(module)`` with every parameter cast to ``dtype``, once, differentiably.

    Unlike autocast there is one rule: what is multiplied is in ``dtype``, and each parameter is
    cast once however often the work uses it. The parameters themselves stay what they are;
    their gradients arrive in their own type.
    """
    if all(parameter.dtype == dtype for parameter in module.parameters()):
        return work(module)
    cast_to = {f"inner.{name}": p.to(dtype) for name, p in module.named_parameters()}
    return cast(T, functional_call(_Around(module), cast_to, (work,)))


class _Around(nn.Module):
    """What functional_call can call: it swaps the parameters of a module during its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, work: Callable[[Any], Any]) -> Any:
        return work(self.inner)


_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] times [K, N], any strides, in their common type."""
    if not _through_onednn(a):
        return a @ b
    if a.stride(0) == 1 and a.stride(1) != 1:
        # oneDNN is a third slower with a transposed first operand than with a transposed second.
        return _onednn(b.T, a.T).T
    return _onednn(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: [..., in] with weight [out, in] to [..., out]."""
    if not _through_onednn(x):
        return F.linear(x, weight, bias)
    out = _Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


class Linear(nn.Linear):
    """``torch.nn.Linear`` through ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight) if ctx.needs_input_grad[0] else None
        grad_weight = product(grad.T, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def _through_onednn(x: Tensor) -> bool:
    return _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    weight = b.T
    if not (weight.is_contiguous() or b.is_contiguous()):
        # Columns of a larger matrix get oneDNN's reference kernel, a thousand times slower.
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
