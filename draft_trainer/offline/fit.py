"""Trains a draft offline on recorded states and keeps it at its best estimated acceptance length.

A fit is a function of its inputs: the recording, the draft, the configuration and the number of
threads. Where it was killed it goes on from its newest training state, and ends with the bits that
it would have ended with.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draft_trainer.checkpoints.checkpoint import load_head, target_ids
from draft_trainer.eagle3.acceptance import AcceptanceEstimate, expected_acceptance
from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.offline.data_order import DataOrder, Position
from draft_trainer.offline.fit_config import FitConfig
from draft_trainer.offline.fit_data import split
from draft_trainer.offline.fit_output import FitOutput, Standing
from draft_trainer.offline.progress import Progress, duration
from draft_trainer.offline.training_log import step_fields
from draft_trainer.recordings.recording import Recording
from draft_trainer.recordings.recording_index import INDEX_FILE
from draft_trainer.training.learner import Learner, StepMetrics
from draft_trainer.training.learner_config import learner_config
from draft_trainer.training.ranks import Ranks, shares
from draft_trainer.training.training_state import head_facts
from slipstream.tensors import digest

_NOT_IN_THE_RESULT = {
    *("threads", "nice", "device", "rank_timeout_s"),
    *("linger_s", "steps_per_candidate", "state_every_steps"),
}


@dataclass(frozen=True)
class FitFolders:
    """What a fit reads and writes.

    Attributes:
        states: the recording.
        draft: the draft that it begins with.
        out: made.
        policy: the draft's policy, where the draft's checkpoint does not say everything.
    """

    states: Path
    draft: Path
    out: Path
    policy: Path | None = None


class Fit:
    """One fit, from reading its inputs to its last step.

    Args:
        folders: what it reads and writes.
        config: how.
        ranks: this process among the ranks that fit together; all call the same methods.
        progress: silent on ranks other than 0.

    Raises:
        RefusedError: states, draft and configuration do not fit one another; nothing was written.
    """

    def __init__(
        self, folders: FitFolders, config: FitConfig, ranks: Ranks, progress: Progress
    ) -> None:
        self._folders = folders
        self._config = config
        self._ranks = ranks
        self._progress = progress
        head, d2t = load_head(folders.draft, folders.policy)
        fit, training = config.fit, config.training
        recording = Recording(
            folders.states,
            lambda done, total: progress.update(f"verifying recorded states {done / total:4.0%}"),
        )
        recording.fit_to(head.config)
        ids = torch.arange(head.config.vocab_size) if d2t is None else target_ids(d2t)
        self._data = split(recording, recording.policy_heads(ids), config)
        self._order = DataOrder(self._data.lengths, training.batch_tokens, training.seed)
        self._total = sum(1 for _ in self._order.steps(fit.epochs))
        self._evaluate_at = {
            round(self._total * (i + 1) / fit.evaluations) for i in range(fit.evaluations)
        }
        self._sha256 = {
            "states": hashlib.sha256((folders.states / INDEX_FILE).read_bytes()).hexdigest(),
            "draft": _sha256(head),
        }
        how = replace(
            learner_config(training),
            decay_steps=self._total,
            decay_share=fit.decay_share,
            decay_floor=fit.decay_floor,
        )
        self._learner = Learner(head.to(ranks.device), how, ranks)
        self._output = FitOutput(folders.out, d2t, training.state_every_steps)
        self._now = Standing()

    def run(self, stopping: threading.Event, resume: bool) -> bool:
        """Train to the end, or to the end of the step during which ``stopping`` is set.

        Args:
            stopping: set by a signal handler.
            resume: go on with the unfinished fit in the output folder, if there is one.

        Returns:
            Whether the fit is done.

        Raises:
            RefusedError: the output folder holds something else, or an unfinished fit of other
                inputs or another configuration.
            RankLostError: another rank is gone.
            OSError: the output folder cannot be written.
        """
        if resume and self._output.is_finished:
            self._progress.say(f"{self._folders.out} is finished")
            return True
        first = self._ranks.rank == 0
        if first:
            self._now = self._output.begin(self._learner, self._belongs_to(), resume)
        try:
            self._agree()
            if first and self._now.step == 0:
                self._output.write("start", **self._start_facts())
                self._evaluate()
            elif self._now.step:
                self._progress.say(f"going on after step {self._now.step} of {self._total}")
            done = self._train(stopping)
            if first and done:
                self._end()
        finally:
            if first:
                self._output.close()
        if first and done:
            self._output.finish()
        return done

    def _agree(self) -> None:
        """Put every rank where rank 0 is."""
        self._learner.take_rank_0()
        where = torch.tensor([self._now.step, self._now.epoch, self._now.index])
        self._ranks.broadcast({"where": where})
        step, epoch, index = where.tolist()
        self._now = replace(self._now, step=step, epoch=epoch, index=index)

    def _train(self, stopping: threading.Event) -> bool:
        began_at, began = time.monotonic(), self._now.step
        while self._now.epoch < self._config.fit.epochs:
            epoch = self._now.epoch
            metrics = self._step()
            now = self._now
            # One rank may have been signalled before the others: they stop together.
            stop = bool(self._ranks.gather(torch.tensor([int(stopping.is_set())])).any())
            if self._ranks.rank == 0:
                where = {"step": now.step, "epoch": epoch, "tokens": now.tokens}
                self._output.write("step", **where, **step_fields(metrics), seconds=now.seconds)
                if self._progress.due:
                    pace = (time.monotonic() - began_at) / (now.step - began)
                    self._progress.update(self._line(metrics, pace))
                if now.step in self._evaluate_at:
                    self._evaluate()
                self._output.after_step(self._learner, self._now)
            if stop and now.step < self._total:
                if self._ranks.rank == 0:
                    self._output.save(self._learner, self._now)
                self._progress.say(
                    f"stopped after step {now.step} of {self._total}; --resume goes on"
                )
                return False
        return True

    def _step(self) -> StepMetrics:
        """One step on this rank's share of the next samples."""
        started = time.perf_counter()
        chosen, position = self._order.next_step(Position(self._now.epoch, self._now.index))
        lengths = [self._data.lengths[i] for i in chosen]
        mine = shares(lengths, self._ranks.size)[self._ranks.rank]
        samples = self._data.batch([chosen[i] for i in mine])
        metrics = self._learner.step(samples, self._data.heads)
        self._now = replace(
            self._now,
            step=self._now.step + 1,
            epoch=position.epoch,
            index=position.index,
            tokens=self._now.tokens + metrics.tokens,
            seconds=self._now.seconds + time.perf_counter() - started,
        )
        return metrics

    def _evaluate(self) -> None:
        """Estimate the acceptance of what would be served; keep it if it is the best so far."""
        started = time.perf_counter()
        served, fit, now = self._learner.snapshot(), self._config.fit, self._now
        estimate = expected_acceptance(
            served,
            self._data.held_out,
            self._data.heads,
            fit.num_speculative_tokens,
            fit.draft_sample_method,
            max_batch_tokens=self._config.training.forward_tokens,
        )
        length, error = estimate.acceptance_length, _standard_error(estimate)
        best = length > now.best
        if best:
            self._now = replace(now, best=length, best_step=now.step)
            self._output.put(served)
        self._output.write(
            "evaluation",
            step=now.step,
            tokens=now.tokens,
            acceptance_length=length,
            standard_error=error,
            accepted_per_position=estimate.accepted_per_position,
            best=best,
            seconds=now.seconds,
        )
        positions = " ".join(f"{rate:.3f}" for rate in estimate.accepted_per_position)
        self._progress.say(
            f"step {now.step}/{self._total}: expected acceptance length {length:.3f} ± {error:.3f} "
            f"(s.e.) at k = {fit.num_speculative_tokens}, per position {positions}"
            f"{', the best so far' if best else ''} ({time.perf_counter() - started:.1f} s)"
        )

    def _end(self) -> None:
        now = self._now
        self._output.write(
            "end",
            step=now.step,
            tokens=now.tokens,
            seconds=now.seconds,
            best_step=now.best_step,
            acceptance_length=now.best,
        )
        self._progress.say(
            f"{self._folders.out}: expected acceptance length {now.best:.3f}, of step "
            f"{now.best_step}; {now.tokens:,} tokens in {duration(now.seconds)}"
        )

    def _belongs_to(self) -> dict[str, object]:
        """What makes another fit's training state wrong for this one."""
        facts: dict[str, object] = {f"sha256 of {k}": v for k, v in self._sha256.items()}
        for name, section in self._config.model_dump(mode="json").items():
            for key in section.keys() - _NOT_IN_THE_RESULT:
                facts[f"{name}.{key}"] = section[key]
        return facts | head_facts(self._learner.head.config)

    def _start_facts(self) -> dict[str, Any]:
        data = self._data
        return {
            "states": str(self._folders.states),
            "draft": str(self._folders.draft),
            "sha256": self._sha256,
            "config": self._config.model_dump(mode="json"),
            "ranks": self._ranks.size,
            "threads": torch.get_num_threads(),
            "steps": self._total,
            "samples": len(data.training),
            "tokens_per_epoch": sum(data.lengths),
            "held_out_samples": len(data.held_out),
            "held_out_tokens": sum(sample.num_tokens for sample in data.held_out),
        }

    def _line(self, metrics: StepMetrics, pace: float) -> str:
        """For a person.

        Args:
            metrics: of the last step.
            pace: seconds per step since this process began.
        """
        rates = " ".join(f"{rate:.3f}" for rate in metrics.step_acceptance)
        return (
            f"step {self._now.step}/{self._total}  {self._now.tokens:,} tokens  "
            f"{metrics.tokens / metrics.seconds:,.0f} tokens/s  loss {metrics.loss:.4f}  "
            f"acceptance {rates}  ETA {duration(pace * (self._total - self._now.step))}"
        )


def _standard_error(estimate: AcceptanceEstimate) -> float:
    return float(estimate.per_sequence.std()) / estimate.sequences**0.5


def _sha256(head: Eagle3Head) -> str:
    """Over its weights' names and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        total.update(name.encode() + digest(tensor))
    return total.hexdigest()
