"""Records a policy's states without a running loop, for ``draft-trainer init`` and ``fit``.

Every rollout goes once more through the policy, under the bridge's own capture. With ``--rollouts``
that is any Hugging Face causal language model and its rollouts, a JSON object a line::

    {"prompt": [token ids], "completion": [token ids]}

Without it, the example's policy solves problems of its task.

Run ``python -m examples.arithmetic_grpo.record --out DIR`` from the repository root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.offline.report import progress_of, say
from draft_trainer.recordings.recorder import RecordingWriter
from draft_trainer.recordings.recording import RecordingFacts
from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.sampling import prompt_ids, sample
from examples.task import Task
from policy_bridge.capture import Capture
from policy_bridge.config import ModulePaths
from policy_bridge.model import PolicyModules, find_modules, stamp_of
from policy_bridge.selection import UniformRandom
from policy_bridge.session import Session
from slipstream.errors import RefusedError
from slipstream.layers import default_aux_layers
from slipstream.sample import Sample

Rollout = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion."""
POLICY_VERSION = 0
_PROBLEMS_AT_ONCE = 1024
_ROLLOUTS_AT_ONCE = 1024


class Recorder:
    """Puts rollouts of one policy into a new recording. A context manager.

    Args:
        model: the policy, on any device, in evaluation mode.
        out: folder of the recording.
        aux_layer_ids: layers to record ("after L layers"); vLLM's default for EAGLE-3 if None;
            none of them where the draft takes the final states alone.
        temperature: of the rollouts.
        states_dtype: what the states are cast to; None keeps the policy's own.
        max_tokens: longer sequences become windows that overlap.
        run_id: names the recording.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        out: Path,
        *,
        aux_layer_ids: tuple[int, ...] | None = None,
        temperature: float = 1.0,
        states_dtype: torch.dtype | None = torch.bfloat16,
        max_tokens: int = 2048,
        run_id: str = "offline",
    ) -> None:
        self._model = model
        self._modules = find_modules(model, ModulePaths())
        depth = len(self._modules.layers)
        layers = default_aux_layers(depth) if aux_layer_ids is None else aux_layer_ids
        vocabulary = torch.arange(self._modules.vocab_size)
        self._session = Session("", layers, vocabulary, max_tokens, None, ())
        self._temperature = temperature
        self._states_dtype = states_dtype
        self._numbers = itertools.count()
        self._writer = RecordingWriter(out, facts_of(self._modules, layers, run_id))
        modules = self._modules
        named = (modules.head_weight, modules.embed_weight, modules.head_bias)
        tensors = (tensor.detach() for tensor in named if tensor is not None)
        self._writer.add_policy(PolicyHead(POLICY_VERSION, *tensors), None)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._writer.flush()

    @property
    def nbytes(self) -> int:
        """Of the recording so far."""
        return self._writer.nbytes

    @torch.no_grad()
    def add(self, rollouts: Sequence[Rollout], batch_tokens: int = 8192) -> None:
        """Record rollouts; neighbours in length share a forward pass of ``batch_tokens``."""
        lengths = [len(prompt) + len(completion) for prompt, completion in rollouts]
        rows: list[int] = []
        for row in sorted(range(len(rollouts)), key=lambda i: lengths[i]):
            if rows and (len(rows) + 1) * lengths[row] > batch_tokens:
                self._forward([rollouts[i] for i in rows])
                rows = []
            rows.append(row)
        if rows:
            self._forward([rollouts[i] for i in rows])

    def _forward(self, rollouts: Sequence[Rollout]) -> None:
        width = max(len(prompt) + len(completion) for prompt, completion in rollouts)
        ids = torch.zeros(len(rollouts), width, dtype=torch.int64)
        mask, completion_mask = ids.bool(), ids.bool()
        for row, (prompt, completion) in enumerate(rollouts):
            end = len(prompt) + len(completion)
            ids[row, :end] = torch.tensor(prompt + completion)
            mask[row, :end] = True
            completion_mask[row, len(prompt) : end] = True
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        with self._window() as capture:
            self._model(input_ids=ids, attention_mask=mask, use_cache=False)
            capture.ship(ids, loss_mask=completion_mask, attention_mask=mask)

    def _window(self) -> Capture:
        """One that takes everything."""
        weights = self._modules.weights()
        return Capture(
            modules=self._modules,
            session=self._session,
            policy_version=POLICY_VERSION,
            weights=weights,
            weights_stamp=stamp_of(weights),
            temperature=self._temperature,
            budget_bytes=sys.maxsize,
            forwards=1,
            states_dtype=self._states_dtype,
            selector=UniformRandom(),
            next_id=lambda: f"offline-{next(self._numbers)}",
            offer=self._write,
        )

    def _write(self, captured: Sample, priority: int = 0) -> bool:
        # Its block is assembled in memory that the next one uses again.
        self._writer.add(Sample(captured.header, captured.block.clone()))
        return True


def facts_of(modules: PolicyModules, layers: tuple[int, ...], run_id: str) -> RecordingFacts:
    """What a recording says of its policy."""
    return RecordingFacts(
        run_id=run_id,
        hidden_size=modules.hidden_size,
        vocab_size=modules.vocab_size,
        num_hidden_layers=len(modules.layers),
        aux_layer_ids=layers,
        logit_scale=modules.form.scale,
        logit_soft_cap=modules.form.soft_cap,
    )


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a file. Raises RefusedError naming the line that is not one."""
    rollouts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found = json.loads(line)
            rollouts.append(([*map(int, found["prompt"])], [*map(int, found["completion"])]))
        except (ValueError, TypeError, KeyError) as error:
            raise RefusedError(
                f"{path} line {number}",
                f"{type(error).__name__}: {error}",
                '{"prompt": [token ids], "completion": [token ids]}',
                "write the ids that the server was sent and answered",
            ) from error
    return rollouts


def solutions(
    model: PreTrainedModel, count: int, seed: int, task: Task[Any] = arithmetic
) -> Iterator[list[Rollout]]:
    """Completions of a task at temperature 1, some at a time."""
    for start in range(0, count, _PROBLEMS_AT_ONCE):
        rng = random.Random(f"{seed}:{start}")
        size = min(_PROBLEMS_AT_ONCE, count - start)
        prompts = [prompt_ids(task.sample_problem(rng), task) for _ in range(size)]
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        drawn = sample(model, prompts, 1.0, generator=generator)
        yield list(zip(drawn.prompts, drawn.completions, strict=True))


def main() -> None:
    """Command line entry."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description="Record a policy's states offline, for draft-trainer init and fit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", type=Path, default=here / "policy", help="policy checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the recording; must not exist")
    parser.add_argument("--rollouts", type=Path, help="JSON lines; else problems are solved")
    parser.add_argument("--count", type=int, default=4096, help="problems to solve")
    parser.add_argument("--temperature", type=float, default=1.0, help="of --rollouts")
    parser.add_argument("--aux-layers", help="numbers like 2,5,7; the default is vLLM's")
    parser.add_argument("--dtype", default="auto", help="of the policy")
    parser.add_argument("--device", default="cpu", help="of the policy")
    parser.add_argument("--states-dtype", default="bfloat16", help="of the recorded states")
    parser.add_argument("--seed", type=int, default=0, help="of the problems and their solutions")
    parser.add_argument("--threads", type=int, default=1, help="torch CPU threads")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.policy, dtype=options.dtype)
    model = model.to(options.device).eval()
    layers = options.aux_layers and tuple(int(layer) for layer in options.aux_layers.split(","))
    if options.rollouts is not None:
        given = read_rollouts(options.rollouts)
        starts = range(0, len(given), _ROLLOUTS_AT_ONCE)
        total = len(given)
        parts = iter([given[start : start + _ROLLOUTS_AT_ONCE] for start in starts])
    else:
        total = options.count
        parts = solutions(model, total, options.seed)
    console, done = Console(stderr=True), 0
    with (
        Recorder(
            model,
            options.out,
            aux_layer_ids=layers or None,
            temperature=options.temperature,
            states_dtype=getattr(torch, options.states_dtype),
        ) as recorder,
        progress_of(console, "recording rollouts") as (bar, task),
    ):
        for part in parts:
            recorder.add(part)
            done += len(part)
            bar.update(task, completed=done, total=total)
    say(console, f"{options.out}: {done} rollouts, {recorder.nbytes >> 20} MiB")


if __name__ == "__main__":
    try:
        main()
    except RefusedError as error:
        sys.exit(f"record: {error}")
