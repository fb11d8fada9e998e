"""Records a policy's states on existing rollouts, for ``init`` and ``fit``.

Every rollout goes once more through the policy, a Hugging Face causal language model, under the
bridge's own capture: this process is the policy's, and the one place of the trainer that imports
the bridge.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.recordings.recorder import RecordingWriter
from draft_trainer.recordings.recording import RecordingFacts
from policy_bridge.adapters.completions import CompletionsClient
from policy_bridge.capture import Capture
from policy_bridge.config import ModulePaths
from policy_bridge.model import PolicyModules, find_modules, watched
from policy_bridge.session import Session
from policy_bridge.stats import Counters
from slipstream.errors import RefusedError
from slipstream.layers import choose_aux_layers
from slipstream.sample import Sample

Rollout = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion."""
POLICY_VERSION = 0
AT_ONCE = 256
"""Rollouts that are in memory at a time."""
PLAIN = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""Fields of a request that samples at its temperature alone, as recordings say: for what it leaves
out, vLLM takes the model's ``generation_config.json``."""


class Recorder:
    """Puts rollouts of one policy into a new recording. A context manager.

    Args:
        model: the policy, on any device, in evaluation mode.
        out: folder of the recording.
        aux_layer_ids: layers to record ("after L layers"); ``choose_aux_layers`` if None; none of
            them where the draft takes the final states alone.
        temperature: of the rollouts.
        states_dtype: what the states are cast to; None keeps the policy's own.
        max_tokens: longer sequences become windows that overlap.

    Attributes:
        samples: recorded so far.
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
    ) -> None:
        self._model = model
        self._modules = find_modules(model, ModulePaths())
        depth = len(self._modules.layers)
        layers = choose_aux_layers(depth) if aux_layer_ids is None else aux_layer_ids
        vocabulary = torch.arange(self._modules.vocab_size)
        self.aux_layer_ids = layers
        self._session = Session("", layers, vocabulary, max_tokens, None, ())
        self._temperature = temperature
        self._states_dtype = states_dtype
        self._numbers = itertools.count()
        self._counters = Counters()
        self.samples = 0
        self._writer = RecordingWriter(out, facts_of(self._modules, layers))
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

    @property
    def left_out(self) -> Mapping[str, int]:
        """Samples that could not be recorded, by reason."""
        return self._counters.snapshot().shed

    @torch.no_grad()
    def add(self, rollouts: Sequence[Rollout], batch_tokens: int = 8192) -> None:
        """Record rollouts; neighbours in length share a forward pass of ``batch_tokens``.

        Raises:
            RefusedError: the device has too little memory for a pass.
        """
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
        # A draft predicts token 2 first. Capture leaves out what has no token from there on.
        if targetless := int((~completion_mask[:, 2:].any(1)).sum()):
            self._counters.shed("nothing_to_train_on", targetless, 0)
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        try:
            with self._window() as capture:
                self._model(input_ids=ids, attention_mask=mask, use_cache=False)
                capture.ship(ids, loss_mask=completion_mask, attention_mask=mask)
            # The bridge sheds such a pass, because the loop needs the memory more; no loop is here.
            full = "device_memory" in self.left_out
        except torch.OutOfMemoryError:
            full = True
        if full:
            found = f"{self._model.device} without memory for a pass of {ids.numel():,} tokens"
            next_step = "free some of its memory, or give another device (cpu)"
            raise RefusedError("--device", found, "memory for every pass", next_step)

    def _window(self) -> Capture:
        """One that takes everything."""
        return Capture(
            modules=self._modules,
            session=self._session,
            policy_version=POLICY_VERSION,
            moved=watched(self._modules.weights()),
            temperature=self._temperature,
            budget_bytes=sys.maxsize,
            forwards=1,
            states_dtype=self._states_dtype,
            next_id=lambda: f"offline-{next(self._numbers)}",
            offer=self._write,
            counters=self._counters,
        )

    def _write(self, captured: Sample, priority: int = 0) -> bool:
        self._writer.add(captured)
        self.samples += 1
        return True


def facts_of(modules: PolicyModules, layers: tuple[int, ...]) -> RecordingFacts:
    """What a recording says of its policy."""
    return RecordingFacts(
        run_id="offline",
        hidden_size=modules.hidden_size,
        vocab_size=modules.vocab_size,
        num_hidden_layers=len(modules.layers),
        aux_layer_ids=layers,
        logit_scale=modules.form.scale,
        logit_soft_cap=modules.form.soft_cap,
    )


def read_rollouts(path: Path, vocab_size: int) -> list[Rollout]:
    """The rollouts of a file, ``{"prompt": [ids], "completion": [ids]}`` a line.

    Args:
        path: JSON lines.
        vocab_size: of the policy; every id is below it.

    Raises:
        RefusedError: naming the line that is not one, or the file that cannot be read.
    """
    rollouts = []
    for place, found in _json_lines(path, "--rollouts"):
        for name in ("prompt", "completion"):
            ids = found.get(name)
            whole = isinstance(ids, list) and all(type(one) is int for one in ids)
            wrong = [one for one in ids if not 0 <= one < vocab_size] if ids and whole else []
            if not whole or wrong:
                raise RefusedError(
                    place,
                    f"{name} {wrong or ids}",
                    f'{{"prompt": [token ids], "completion": [token ids]}}, ids below {vocab_size}',
                    "write the ids that the server was sent and answered, of this policy",
                )
        rollouts.append((found["prompt"], found["completion"]))
    return rollouts


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The prompts of a file as token ids.

    Args:
        path: JSON, a line each: ``{"prompt": [ids]}``, ``{"prompt": "text"}``, or
            ``{"messages": [...]}``, which goes through the policy's chat template.
        tokenizer: the policy's.

    Raises:
        RefusedError: naming the line that is none of these, or the file that cannot be read.
    """
    prompts = []
    for place, found in _json_lines(path, "--prompts"):
        try:
            if "messages" in found:
                text = tokenizer.apply_chat_template(
                    found["messages"], add_generation_prompt=True, tokenize=False
                )
                prompts.append(tokenizer.encode(text, add_special_tokens=False))
            elif isinstance(found["prompt"], str):
                prompts.append(tokenizer.encode(found["prompt"]))
            else:
                prompts.append([*map(int, found["prompt"])])
        except (ValueError, TypeError, KeyError) as error:
            raise RefusedError(
                place,
                f"{type(error).__name__}: {error}",
                '{"prompt": "text"}, {"prompt": [token ids]} or {"messages": [...]}',
                "write one of these a line",
            ) from error
    return prompts


def generated(
    url: str, model: str, prompts: Sequence[list[int]], sampling: Mapping[str, Any]
) -> Iterator[list[Rollout]]:
    """Completions of prompts, ``AT_ONCE`` at a time.

    Args:
        url: of a server that answers ``/v1/completions`` with token ids, as vLLM does.
        model: its name of the policy.
        prompts: token ids; equal neighbours go as one request.
        sampling: fields of the requests.

    Raises:
        RefusedError: the server did not answer, or not with token ids.
    """
    with CompletionsClient([url], model) as client:
        for start in range(0, len(prompts), AT_ONCE):
            part = prompts[start : start + AT_ONCE]
            try:
                answered = client.generate(part, sampling)
            except httpx.HTTPError as error:
                expected = f"completions of the model {model}"
                next_step = "start the server, or correct --endpoint and --model"
                raise RefusedError("--endpoint", f"{url} ({error})", expected, next_step) from error
            yield [(prompt, one.token_ids) for prompt, one in zip(part, answered, strict=True)]


def _json_lines(path: Path, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line is, and its object."""
    try:
        with path.open(encoding="utf-8") as file:
            # Not splitlines, which also splits at characters that a JSON string may have.
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(option, error, "a file of JSON lines in UTF-8", "name one") from error
    if not lines:
        raise RefusedError(option, f"{path}: no line", "a file of JSON lines in UTF-8", "name one")
    for number, line in enumerate(lines, 1):
        place = f"{path} line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise RefusedError(place, error, "JSON", "write an object a line") from error
        if not isinstance(found, dict):
            raise RefusedError(place, type(found).__name__, "an object", "write {...} a line")
        yield place, found
