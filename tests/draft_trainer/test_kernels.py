"""The C kernels against the plain torch that they stand in for."""

from __future__ import annotations

import ctypes
import pwd
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters import loss as soft_targets
from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.block import Norm
from draft_trainer.drafters.loss import Target
from draft_trainer.drafters.ops import cpu_precision, rms_norm, rotate_heads, swiglu
from draft_trainer.kernels import library
from draft_trainer.kernels.library import runs_on, use_kernels, using_kernels
from slipstream.errors import RefusedError
from tests.machine import lacking

compiled = pytest.mark.skipif("compiler" in lacking(), reason=lacking().get("compiler", ""))

# The loss of a row that agrees is the difference of two numbers near 29, in float32.
LOSS_ROUNDING = 3e-5


def _scored(
    mode: library.Mode, dtype: torch.dtype, target: Target, learns: bool, broken: bool = False
) -> tuple[Tensor, Tensor]:
    """Metrics, and the logits afterwards, of 3 steps of 21 rows of a longer chunk."""
    generator = torch.Generator().manual_seed(0)
    chunk = (3 * torch.randn(3, 30, 5003, generator=generator)).to(dtype)
    policy = (2 * torch.randn(21, 5003, generator=generator)).to(dtype)
    # Some rows agree on the likeliest token.
    policy[::3, 17], chunk[:, :21:3, 17] = 20.0, 20.0
    temperature = torch.where(torch.arange(21) % 2 == 0, 0.7, 1.0)
    # A fifth of the policy's mass lies outside the draft vocabulary.
    log_z = (policy.float() / temperature[:, None]).logsumexp(-1) + 0.223
    if broken:
        chunk[1, 4, 2] = torch.nan
    logits = chunk[:, :21]
    with using_kernels(mode):
        scores = soft_targets._score_blocks(
            logits, policy, log_z, 1.0 / temperature, target, learns
        )
    return scores, chunk


@compiled
@pytest.mark.parametrize("target", ["kl", "tv", "lk", "dspark"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_scores_and_gradients_match_torch(target: Target, dtype: torch.dtype) -> None:
    scores, after = _scored("on", dtype, target, learns=True)
    reference, gradient = _scored("off", dtype, target, learns=True)
    torch.testing.assert_close(scores, reference, rtol=1e-5, atol=LOSS_ROUNDING)
    assert 0.3 < float(scores[..., 1].mean()) < 0.4
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(after, gradient, rtol=rounding, atol=4e-6)
    # The rest of the chunk is another block's.
    assert torch.equal(after[:, 21:], gradient[:, 21:])


@compiled
def test_kernel_scores_without_gradient_keep_logits() -> None:
    scores, after = _scored("on", torch.float32, "kl", learns=False)
    reference, before = _scored("off", torch.float32, "kl", learns=False)
    assert torch.equal(after, before)
    torch.testing.assert_close(scores, reference, rtol=1e-5, atol=LOSS_ROUNDING)


@compiled
@pytest.mark.parametrize("target", ["kl", "tv", "lk"])
def test_kernel_passes_nan_through(target: Target) -> None:
    """That is how a step that must be skipped is found."""
    scores, _ = _scored("on", torch.float32, target, learns=True, broken=True)
    assert scores[..., 0].isnan().nonzero().tolist() == [[1, 4]]


def _attended(
    mode: library.Mode, dtype: torch.dtype, size: int, anchors: int
) -> tuple[Tensor, list[Tensor]]:
    """Attend over 2 rows of 83 positions and two later steps; return output and all gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(length: int, heads: int) -> Tensor:
        x = torch.randn(2, length, heads, size, generator=generator).to(dtype)
        return x.requires_grad_()

    q, k, v = normal(anchors, 6), normal(83, 2), normal(83, 2)
    # As the unroll has them: parts of one product.
    own = [normal(anchors, 4).split(2, dim=2) for _ in range(2)]
    grad = torch.randn(2, anchors, 6, size, generator=generator).to(dtype)
    with using_kernels(mode):
        out = ttt_attention(q, k, v, own)
        inputs = [q, k, v, *(tensor for pair in own for tensor in pair)]
        return out.detach(), list(torch.autograd.grad(out, inputs, grad))


@compiled
@pytest.mark.parametrize(("size", "anchors"), [(32, 83), (24, 50), (64, 1), (128, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_attention_matches_torch(dtype: torch.dtype, size: int, anchors: int) -> None:
    out, grads = _attended("on", dtype, size, anchors)
    reference, expected = _attended("off", dtype, size, anchors)
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    for found, wanted in zip([out, *grads], [reference, *expected], strict=True):
        assert found.dtype == dtype
        assert float((found - wanted).float().norm()) <= bound * float(wanted.float().norm())


@compiled
def test_kernel_bits_do_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            scores, after = _scored("on", torch.float32, "kl", learns=True)
            out, grads = _attended("on", torch.float32, 32, 83)
            results.append([scores, after, out, *grads])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("refuses", [False, True])
def test_kernels_compile_at_path_with_space(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources and cache; wide vectors where the processor and the compiler have them."""
    sources = tmp_path / "some sources"
    shutil.copytree(Path(library.__file__).parent, sources)
    monkeypatch.setattr(library, "__file__", str(sources / "library.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    compiler = tmp_path / "a compiler"
    refusal = f'case "$*" in *{library._WIDE}*) exit 1;; esac\n' if refuses else ""
    compiler.write_text(f'#!/bin/sh\n{refusal}exec cc "$@"\n')
    compiler.chmod(0o755)
    made, said = library._compiled(str(compiler))
    assert made.is_relative_to(tmp_path / "a cache") and said.startswith("compiled by")
    assert ctypes.CDLL(str(made)).step_keys_forward
    flags, target = library._flags(str(compiler))
    assert (library._WIDE in flags) == ("__AVX512F__" in target and not refuses)


@compiled
def test_kernels_without_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may be a number without a home folder."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    built = library._built.__wrapped__()
    assert built.functions is None and "home directory" in built.said


def test_kernels_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_built", lambda: library._Built(None, "there is no cc"))
    with using_kernels("auto"):
        assert not runs_on(torch.zeros(1))
        with pytest.raises(RefusedError, match="there is no cc"):
            use_kernels("on")
        assert not runs_on(torch.zeros(1))


@compiled
def test_kernels_skip_float64_and_off() -> None:
    with using_kernels("on"):
        assert runs_on(torch.zeros(1))
        assert not runs_on(torch.zeros(1, dtype=torch.float64))
    with using_kernels("off"):
        assert not runs_on(torch.zeros(1))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", ["swiglu", "rms_norm"])
def test_kernel_row_operations_match_float64(operation: str, dtype: torch.dtype) -> None:
    """150 rows: more than two blocks of a weight's gradient; against exact float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 75, 100, generator=generator).to(dtype)
    weight = torch.randn(100, generator=generator).to(dtype)
    grad = torch.randn(2, 75, 50 if operation == "swiglu" else 100, generator=generator).to(dtype)

    def run(mode: library.Mode, like: torch.dtype) -> list[Tensor]:
        inputs = [tensor.detach().to(like).requires_grad_() for tensor in (x, weight)]
        with using_kernels(mode):
            if operation == "swiglu":
                del inputs[1]
                out = swiglu(*inputs)
            else:
                out = rms_norm(*inputs, 1e-6)
            return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(like))]

    bound = 3e-7 if dtype == torch.float32 else 2**-8
    for found, exact in zip(run("on", dtype), run("off", torch.float64), strict=True):
        assert found.dtype == dtype
        assert float((found.double() - exact).norm()) <= bound * float(exact.norm())


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_zero_centred_norm_weight_is_added_in_float32(
    mode: library.Mode, dtype: torch.dtype
) -> None:
    """Against exact float64; in bfloat16 1 + 0.003 is 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 75, 100, generator=generator).to(dtype)
    grad = torch.randn(2, 75, 100, generator=generator).to(dtype)
    norm = Norm(100, 1e-6, offset=1.0)
    torch.nn.init.constant_(norm.weight, 0.003)
    norm.to(dtype)

    def run(norm: Norm, x: Tensor, grad: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        with using_kernels(mode):
            out = norm(x)
            return [out.detach(), *torch.autograd.grad(out, [x, norm.weight], grad)]

    found = run(norm, x, grad)
    exact = run(norm.double(), x.double(), grad.double())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other).norm()) <= 2**-8 * float(other.norm())
    if dtype == torch.bfloat16:
        # Not off to one side, as it is without the 0.003.
        scale = float((found[0].double() * exact[0]).sum() / exact[0].square().sum())
        assert scale == pytest.approx(1.0, abs=5e-4)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [24, 16])
def test_kernel_rotary_matches_float64(rotated: int, dtype: torch.dtype) -> None:
    """Two of three heads, all of their elements and two thirds of them; against exact float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 3, 24, generator=generator).to(dtype)
    grad = torch.randn(2, 7, 3, 24, generator=generator).to(dtype)
    angle = torch.randn(2, 7, 1, rotated // 2, generator=generator)
    cos, sin = angle.cos(), angle.sin()

    def run(mode: library.Mode, like: torch.dtype) -> list[Tensor]:
        given = x.to(like).requires_grad_()
        wide = torch.promote_types(like, torch.float32)
        with using_kernels(mode):
            out = rotate_heads(given, 2, cos.to(wide), sin.to(wide))
            return [out.detach(), *torch.autograd.grad(out, [given], grad.to(like))]

    bound = 1e-7 if dtype == torch.float32 else 2**-8
    for found, exact in zip(run("on", dtype), run("off", torch.float64), strict=True):
        assert found.dtype == dtype
        assert float((found.double() - exact).norm()) <= bound * float(exact.norm())


@pytest.mark.parametrize(
    ("machine", "capability", "expected"),
    [
        ("x86_64", "AVX2", "float32"),
        ("x86_64", "DEFAULT", "float32"),
        ("x86_64", "AVX512", "bfloat16"),
        ("aarch64", "DEFAULT", "bfloat16"),
    ],
)
def test_precision_is_the_faster_one_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, expected: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert cpu_precision() == expected
