"""Trains the head: one optimizer step on a set of samples, on one rank or several.

The head's optimizer: AdamW or Muon, clipping of its own, and the average of the weights.

Muon: momentum whose update is the nearest orthogonal matrix, for the head's hidden matrices.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the
scale that lets it share AdamW's learning rate is that of "Muon is Scalable for LLM Training"
(arXiv 2502.16982), section 2.2.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from draft_trainer.config import LearnerConfig, StepMetrics
from draft_trainer.drafters import Draft
from draft_trainer.drafters.batch import Batch, batches
from draft_trainer.drafters.loss import METRICS, step_weights, ttt_objective, valid_targets
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.sample import Sample
from draft_trainer.training.ranks import Ranks
from slipstream.errors import RefusedError

MOMENTUM = 0.95
_ITERATIONS = 5
# Newton-Schulz polynomial a x + b x^3 + c x^5: steep at 0, so that five iterations bring every
# singular value from the smallest that matter to between 0.7 and 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ADAMW_RMS = 0.2


class Muon:
    """One momentum per matrix, where AdamW keeps two moments.

    Args:
        parameters: matrices by name, float32.
        weight_decay: decoupled, as AdamW's.
        compute_dtype: what the iteration multiplies in; bfloat16 is enough for it.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        weight_decay: float,
        compute_dtype: torch.dtype,
    ) -> None:
        self._parameters = parameters
        self._weight_decay = weight_decay
        self._compute_dtype = compute_dtype
        self.momentum = {
            name: torch.zeros_like(p, memory_format=torch.preserve_format)
            for name, p in parameters.items()
        }
        """By parameter name, float32; not copies."""

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every matrix by its gradient.

        Args:
            rate: AdamW's learning rate: an entry moves by ``_ADAMW_RMS * rate`` in the quadratic
                mean, which is about what AdamW's entries do.
        """
        for name, p in self._parameters.items():
            assert p.grad is not None
            momentum = self.momentum[name].lerp_(p.grad, 1.0 - MOMENTUM)
            # Nesterov: the gradient of now once more.
            update = orthogonal(p.grad.lerp(momentum, MOMENTUM).to(self._compute_dtype))
            p.mul_(1.0 - rate * self._weight_decay)
            p.add_(update, alpha=-rate * _ADAMW_RMS * max(p.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values brought near 1.

    Args:
        matrix: [m, n], float32 or bfloat16.

    Returns:
        the same shape and type; zeros for zeros.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.float().norm().clamp(min=1e-30).to(x.dtype)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class HeadOptimizer:
    """Moves a head's float32 weights. Every state of it is a named tensor, from the start.

    "adamw" moves every parameter with AdamW. "muon" moves with Muon the matrices between hidden
    states; lm_head, whose rows are tokens and not directions, and the vectors stay with AdamW.

    Args:
        head: whose weights it moves; float32.
        config: rates, clipping and averaging.
    """

    def __init__(self, head: Draft, config: LearnerConfig) -> None:
        self._parameters = dict(head.named_parameters())
        self._config = config
        self._average = self._copies() if config.weight_averaging else {}
        self.restart()

    def restart(self) -> None:
        """Fresh moments; weights and average stay."""
        config = self._config
        hidden = {
            name: p
            for name, p in self._parameters.items()
            if config.optimizer == "muon" and p.ndim == 2 and not name.startswith("lm_head.")
        }
        self._muon = Muon(hidden, config.weight_decay, config.compute_dtype)
        self._adam_parameters = {n: p for n, p in self._parameters.items() if n not in hidden}
        rest = self._adam_parameters.values()
        self._adam = torch.optim.AdamW(
            [
                {
                    "params": [p for p in rest if p.ndim >= 2],
                    "weight_decay": config.weight_decay,
                },
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )
        for p in rest:
            # As AdamW itself would at its first step: so that every state has the same names.
            self._adam.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The weights that are judged and released, by parameter name; not copies."""
        return self._average or {name: p.detach() for name, p in self._parameters.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Moments and average by name; not copies."""
        named = {
            f"optimizer.{name}.{key}": self._adam.state[p][key]
            for name, p in self._adam_parameters.items()
            for key in MOMENTS
        }
        named |= {f"optimizer.{n}.momentum": tensor for n, tensor in self._muon.momentum.items()}
        return named | {f"average.{name}": tensor for name, tensor in self._average.items()}

    def with_gradients(self) -> list[torch.nn.Parameter]:
        """All parameters, those that backward did not reach with a gradient of zeros."""
        for p in self._parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return list(self._parameters.values())

    def gradient_norm(self) -> float:
        """The global Euclidean norm."""
        return float(get_total_norm([p.grad for p in self.with_gradients() if p.grad is not None]))

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """Clip, move the weights, and take them into the average.

        Args:
            rate: learning rate.
            norm: what ``gradient_norm`` said.
        """
        if norm > self._config.grad_clip:
            total = torch.tensor(norm)
            clip_grads_with_norm_(self._parameters.values(), self._config.grad_clip, total)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._muon.step(rate)
        for name, average in self._average.items():
            average.lerp_(self._parameters[name], 1.0 - self._config.weight_averaging)

    def clear_gradients(self) -> None:
        """Free them."""
        for p in self._parameters.values():
            p.grad = None

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}


class Learner:
    """Owns the head's float32 master weights and their optimizer. Not thread-safe.

    Two learners that start from the same weights and take the same steps have the same bits, on
    the same hardware with the same number of threads; on a GPU, whether torch uses deterministic
    algorithms is the caller's choice.

    Args:
        head: trained in place, on the device where it lies.
        config: how.
        ranks: with more than one, ``step`` is called by all of them together, each with its share
            of the samples, after ``take_rank_0`` has given all of them the same weights.
    """

    def __init__(self, head: Draft, config: LearnerConfig, ranks: Ranks | None = None) -> None:
        self.head = head.float()
        self.config = config
        self.steps = 0
        self.steps_skipped = 0
        self.anchors_trained = 0
        self.steps_since_restart = 0
        self._weights = step_weights(config.ttt_steps, config.step_weight_decay)
        self._optimizer = HeadOptimizer(head, config)
        self._ranks = ranks or Ranks()

    def step(self, samples: Sequence[Sample], policy_heads: PolicyHeads) -> StepMetrics:
        """One optimizer step on all of ``samples``, of all ranks.

        Every rank's loss is divided by the anchors of all ranks, so the sum of their gradients is
        that of one rank with all samples. A non-finite loss or gradient norm leaves weights and
        optimizer as they were, on every rank, and is counted in ``steps_skipped``.

        Args:
            samples: this rank's share; at least one on some rank.
            policy_heads: must hold their policy versions.

        Raises:
            RefusedError: a policy version is not held, here or on another rank; nothing was
                changed on any of them.
            RankLostError: another rank is gone.
        """
        started = time.perf_counter()
        steps = self.config.ttt_steps
        parts, tally = self._agree(samples, policy_heads)
        counts, tokens = tally[:, :steps].sum(0), int(tally[:, steps].sum())
        self._optimizer.clear_gradients()
        # The loss, then METRICS of every TTT step.
        totals = torch.zeros(
            1 + steps * len(METRICS), dtype=torch.float64, device=self.head.lm_head.weight.device
        )
        for batch, valid in parts:
            totals += self._backward(batch, valid, counts.clamp(min=1))
        totals = self._ranks.sum(totals.cpu())
        self._ranks.sum_gradients(self._optimizer.with_gradients())
        norm = self._optimizer.gradient_norm()
        rate = self.config.schedule.rate(self.steps, self.steps_since_restart)
        finite = bool(totals.isfinite().all()) and norm < float("inf")
        skipped = not finite or int(counts[0]) == 0
        self.steps_skipped += not finite
        if not skipped:
            self._optimizer.step(rate, norm)
            self.steps += 1
            self.steps_since_restart += 1
            self.anchors_trained += int(counts[0])
        self._optimizer.clear_gradients()
        sums = totals[1:].view(steps, len(METRICS))
        means = sums / torch.where(counts > 0, counts, torch.nan)[:, None]
        columns = {name: tuple(means[:, i].tolist()) for i, name in enumerate(METRICS)}
        return StepMetrics(
            skipped=skipped,
            loss=float(totals[0]),
            step_loss=columns["loss"],
            step_acceptance=columns["acceptance"],
            step_top1=columns["top1_agreement"],
            outside_mass=columns["outside_mass"][0],
            grad_norm=norm,
            learning_rate=rate,
            anchors=int(counts[0]),
            tokens=tokens,
            seconds=time.perf_counter() - started,
            policy_version=int(tally[:, steps + 1].max()),
        )

    @torch.no_grad()
    def snapshot(self, dtype: torch.dtype = torch.bfloat16) -> Draft:
        """A float32 copy of the averaged head, its weights rounded to ``dtype``, as it is served.

        The gate must judge these weights: rounding is part of a release.
        """
        head = copy.deepcopy(self.head).requires_grad_(False)
        for name, parameter in head.named_parameters():
            parameter.copy_(self._optimizer.averaged[name].to(dtype))
        return head

    def restart_optimizer(self) -> None:
        """Fresh moments and a new warm-up: for another policy, whose gradients are other ones."""
        self._optimizer.restart()
        self.steps_since_restart = 0

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, average, moments and counters, copied to the CPU, for a ``StateStore``.

        With the position in the data it is all that the next steps depend on.
        """
        return {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of ``state_dict``: what follows is what would have followed there.

        A change of ``weight_averaging`` is no obstacle: the average starts at the weights.

        Raises:
            RefusedError: a tensor is missing, unknown or of another shape or type; nothing was
                changed.
        """
        own = self._tensors()
        if not self.config.weight_averaging:
            state = {k: v for k, v in state.items() if not k.startswith("average.")}
        elif not any(name.startswith("average.") for name in state):
            head = {k: v for k, v in state.items() if k.startswith("head.")}
            state = {**state, **{k.replace("head.", "average.", 1): v for k, v in head.items()}}
        for name in sorted(own.keys() | state.keys()):
            found, expected = (
                (list(some[name].shape), some[name].dtype) if name in some else None
                for some in (state, own)
            )
            if found != expected:
                raise RefusedError(
                    f"learner state {name}",
                    found,
                    expected,
                    "resume from a state that was saved for this head",
                )
        for name, tensor in own.items():
            tensor.detach().copy_(state[name])
        self._take_counters(state)

    def take_rank_0(self) -> None:
        """Have every rank take rank 0's state; called by all of them together."""
        own = self._tensors()
        self._ranks.broadcast({name: tensor.detach() for name, tensor in own.items()})
        self._take_counters(own)

    def _agree(
        self, samples: Sequence[Sample], policy_heads: PolicyHeads
    ) -> tuple[list[tuple[Batch, Tensor]], Tensor]:
        """This rank's batches, and of every rank: counts [K], tokens, newest policy version."""
        steps = self.config.ttt_steps
        parts: list[tuple[Batch, Tensor]] = []
        refusal = None
        device = self.head.lm_head.weight.device
        try:
            size = self.config.max_batch_tokens
            for batch in batches(samples, policy_heads, size, device, window_steps=steps):
                parts.append((batch, valid_targets(batch, steps)))
        except RefusedError as error:
            # Told to the others first: they would wait for this rank until the deadline.
            refusal = error
        counts = torch.zeros(steps, dtype=torch.int64)
        for _, valid in parts:
            counts += valid.flatten(1).sum(1).cpu()
        own = [
            sum(sample.tokens for sample in samples),
            max((sample.policy_version for sample in samples), default=-1),
            int(refusal is not None),
        ]
        tally = self._ranks.gather(torch.cat([counts, torch.tensor(own)]))
        if refusal is not None:
            raise refusal
        refused = tally[:, -1].nonzero().flatten().tolist()
        if refused:
            raise RefusedError(
                "samples",
                f"refused by rank {refused[0]}",
                "samples that every rank can train on",
                f"see the log of rank {refused[0]}",
            )
        return parts, tally

    def _backward(self, batch: Batch, valid: Tensor, denominators: Tensor) -> Tensor:
        outcome = ttt_objective(
            self.head,
            batch,
            valid,
            weights=self._weights,
            denominators=denominators.to(valid.device),
            compute_dtype=self.config.compute_dtype,
            target=self.config.target,
        )
        if outcome.loss.requires_grad:
            outcome.loss.backward()
        return torch.cat([outcome.loss.detach().double()[None], outcome.sums.flatten()])

    def _tensors(self) -> dict[str, Tensor]:
        named = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        counters = {f"counter.{name}": torch.tensor(getattr(self, name)) for name in _COUNTERS}
        return named | self._optimizer.tensors | counters

    def _take_counters(self, state: Mapping[str, Tensor]) -> None:
        for name in _COUNTERS:
            setattr(self, name, int(state[f"counter.{name}"]))


_COUNTERS = ("steps", "steps_skipped", "anchors_trained", "steps_since_restart")
