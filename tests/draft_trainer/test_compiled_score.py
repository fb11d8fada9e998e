"""A compiled score function is used only where it computes what eager computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from draft_trainer.drafters import loss
from draft_trainer.drafters.compiled_score import compile_score
from draft_trainer.kernels.library import using_kernels
from draft_trainer.training.learner import Learner, TrainingConfig
from tests.draft_trainer.synthetic import DRAFT_VOCAB, Policy, head

STEPS = 3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loss, "compiled_score", None)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("target", ["kl", "tv", "lk"])
def test_training_with_a_compiled_score_takes_the_same_steps(target: loss.Target) -> None:
    policy = Policy()
    samples, heads = policy.samples(8), policy.heads()

    def losses() -> list[float]:
        config = TrainingConfig(
            target=target, ttt_steps=STEPS, warmup_steps=0, compute_dtype="bfloat16"
        )
        learner = Learner(head(0), config)
        # Two numbers of rows: one graph has to serve both.
        return [learner.step(samples[: 4 + 4 * (n % 2)], heads).loss for n in range(4)]

    with using_kernels("off"):
        eager = losses()
        graphs = list[int]()

        def backend(graph: Any, inputs: Sequence[Any]) -> Any:
            graphs.append(len(inputs))
            return aot_eager(graph, inputs)

        assert compile_score(CPU, STEPS, DRAFT_VOCAB, target, backend) == ""
        assert losses() == pytest.approx(eager, rel=1e-6)
    # By the types of logits and by temperature, and none in a step.
    assert loss.compiled_score is not None and len(graphs) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_chunk_of_one_row_is_scored_by_a_sum_too(dtype: torch.dtype) -> None:
    """It has graphs of its own; torch compiles no more than eight of a function unasked."""
    z, y = torch.randn(STEPS, 1, DRAFT_VOCAB), torch.randn(1, DRAFT_VOCAB)
    given = y.to(dtype), y.logsumexp(-1), torch.ones(1), "dspark", True, False
    with using_kernels("off"):
        expected = loss._score_blocks(z.bfloat16(), *given)  # type: ignore[arg-type]
        assert compile_score(CPU, STEPS, DRAFT_VOCAB, "dspark", aot_eager) == ""
        found = loss._score_blocks(z.bfloat16(), *given)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def wrong(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    def call(*given: Tensor) -> Any:
        return [1.001 * each for each in graph(*given)]

    return call


def broken(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    raise RuntimeError("no code generator")


@pytest.mark.parametrize(
    ("backend", "reason"), [(wrong, "scores differ by up to"), (broken, "no code generator")]
)
def test_a_score_that_differs_or_does_not_compile_is_not_used(
    backend: Callable[..., Any], reason: str
) -> None:
    assert reason in compile_score(CPU, STEPS, DRAFT_VOCAB, "kl", backend)
    assert loss.compiled_score is None


@pytest.mark.slow
def test_score_compiles_by_inductor_on_cpu() -> None:
    assert compile_score(CPU, STEPS, DRAFT_VOCAB, "kl") == ""
