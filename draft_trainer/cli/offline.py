"""``draft-trainer record``, ``init`` and ``fit``: record states, make a draft, train it."""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from draft_trainer.cli.trainer import File, Folder, at_least
from slipstream.errors import RefusedError
from slipstream.hub import local_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from draft_trainer.checkpoints import PolicyCheckpoint
    from draft_trainer.drafters import Draft
    from draft_trainer.offline.record import Rollout

DEFAULT_DRAFT_VOCAB = 32_000
_DTYPES = Literal["auto", "float32", "bfloat16", "float16"]

Needed = Annotated[Path, arg(metavar="DIR")]
Kind = Annotated[str | None, arg(metavar="KIND", help_behavior_hint="(optional)")]
Count = Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record a policy's hidden states, to make and train a draft.

    Runs rollouts through the policy and stores its hidden states: four states per token with 2
    bytes per value, which is 32 KiB per token for a hidden size of 4096. The rollouts come from the
    file given with --rollouts, or are generated from --prompts by the OpenAI-compatible vLLM server
    at the address given with --endpoint, which must serve the same policy. That server samples
    at --temperature alone, whatever the policy's generation_config.json says.
    """

    policy: Needed
    """The policy: a Hugging Face checkpoint, or its name on the hub."""
    out: Needed
    """The recording; must not exist."""
    rollouts: File = None
    """File with one {"prompt": [token ids], "completion": [token ids]} per line."""
    prompts: File = None
    """File with one {"prompt": "text"}, {"prompt": [token ids]} or {"messages": [...]} per line."""
    endpoint: Annotated[str | None, arg(metavar="URL", help_behavior_hint="(optional)")] = None
    """http://HOST:PORT of the server that completes --prompts."""
    model: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(optional)")] = None
    """The policy's name on that server; by default the value of --policy."""
    samples: Annotated[int, arg(metavar="N")] = 1
    """Completions of each prompt."""
    max_tokens: Annotated[int, arg(metavar="N")] = 1024
    """Maximum tokens of a completion."""
    temperature: Annotated[float, arg(metavar="X")] = 1.0
    """Sampling temperature of the rollouts; above 0."""
    aux_layers: Annotated[str | None, arg(metavar="L,L,L", help_behavior_hint="(optional)")] = None
    """Record after these decoder layers (default: 2, n // 2 and n - 3 of n; others below 8)."""
    dtype: _DTYPES = "auto"
    """Type of the policy's weights."""
    device: Annotated[str, arg(metavar="DEVICE")] = "cpu"
    """Where the policy runs: cpu, cuda, cuda:1."""
    threads: Count = None
    """Threads of torch (default: torch's own)."""

    def run(self) -> int:
        """Writes the recording and prints what is in it."""
        import torch
        from rich.console import Console
        from transformers import AutoModelForCausalLM

        from draft_trainer.checkpoints import read_policy_config, size_of
        from draft_trainer.drafters.initial import aux_layers
        from draft_trainer.files import check_free
        from draft_trainer.offline.record import Recorder
        from draft_trainer.offline.report import progress_of

        at_least("--samples", self.samples, 1)
        at_least("--max-tokens", self.max_tokens, 1)
        at_least("--temperature", self.temperature, 1e-3)
        check_free(self.out, "--out")
        layers = None if self.aux_layers is None else _layers(self.aux_layers)
        folder = local_folder(self.policy, "--policy")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        config = read_policy_config(folder)
        layers = aux_layers(config, layers, first=0)
        try:
            torch.empty(0, device=self.device)
        except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts
            found = f"{self.device} ({str(error).partition(chr(10))[0]})"
            next_step = "name one; for a GPU, install a torch with CUDA (nvidia-smi lists GPUs)"
            raise RefusedError("--device", found, "a device of this torch", next_step) from error
        total, parts = self._parts(folder, size_of(config, "vocab_size"))
        # The first part asks the server: before the policy is loaded and --out is made.
        parts = itertools.chain([next(parts, [])], parts)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
            model = model.to(self.device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().partition("\n")[0]
            expected = "a causal language model that transformers loads there"
            next_step = (
                "give its folder as save_pretrained writes it, and a --device with enough memory"
            )
            raise RefusedError("--policy", f"{folder} ({first})", expected, next_step) from error
        done = 0
        with (
            Recorder(
                model, self.out, aux_layer_ids=layers, temperature=self.temperature
            ) as recorder,
            progress_of(Console(stderr=True), "recording rollouts") as (bar, task),
        ):
            for part in parts:
                recorder.add(part)
                done += len(part)
                bar.update(task, completed=done, total=total)
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in recorder.left_out.items())
        told = f"; samples left out: {left_out}" if left_out else ""
        if not recorder.samples:
            raise RefusedError(
                "--rollouts" if self.prompts is None else "--prompts",
                f"{done:,} rollouts, no sample{told}",
                "completions with tokens to train on, whose log-probabilities are finite",
                f"remove {self.out}, and give others, or another --dtype if samples are non_finite",
            )
        numbers = ", ".join(map(str, recorder.aux_layer_ids))
        print(
            f"{self.out}: {done:,} rollouts, {recorder.nbytes >> 20:,} MiB, states after layers "
            f"{numbers}{told}"
        )
        return 0

    def _parts(self, folder: Path, vocab_size: int) -> tuple[int, Iterator[list[Rollout]]]:
        """How many rollouts, and the rollouts, some at a time."""
        from draft_trainer.offline.record import (
            AT_ONCE,
            PLAIN,
            generated,
            read_prompts,
            read_rollouts,
        )

        if (self.rollouts is None) == (self.prompts is None):
            found = "none or both of --rollouts and --prompts"
            next_step = "give --rollouts FILE, or --prompts FILE with --endpoint URL"
            raise RefusedError("--rollouts", found, "one of them", next_step)
        if self.rollouts is not None:
            given = read_rollouts(self.rollouts, vocab_size)
            starts = range(0, len(given), AT_ONCE)
            return len(given), (given[start : start + AT_ONCE] for start in starts)
        if self.endpoint is None or not self.endpoint.startswith(("http://", "https://")):
            found = self.endpoint or "nothing"
            next_step = "name the server that completes the prompts"
            raise RefusedError("--endpoint", found, "http://HOST:PORT with --prompts", next_step)
        from transformers import AutoTokenizer

        assert self.prompts is not None
        prompts = read_prompts(self.prompts, AutoTokenizer.from_pretrained(folder))
        repeated = [prompt for prompt in prompts for _ in range(self.samples)]
        sampling = {**PLAIN, "max_tokens": self.max_tokens, "temperature": self.temperature}
        name = self.model or str(self.policy)
        return len(repeated), generated(self.endpoint, name, repeated, sampling)


@dataclass(frozen=True, kw_only=True)
class Init:
    """Make a draft for a policy, or extract the policy's own MTP head.

    By default, makes an untrained EAGLE-3 draft that vLLM loads: sizes, lm_head and final norm are
    the policy's, the draft vocabulary is the tokens recorded most often. With --draft-kind dflash,
    makes an untrained DFlash draft, whose embeddings and lm_head are the policy's. With mtp,
    extracts only the policy's MTP head. Train the draft with draft-trainer fit or draft-trainer
    serve.
    """

    policy: Needed
    """The policy: a Hugging Face checkpoint (safetensors), or its name on the hub."""
    out: Needed
    """The draft; must not exist."""
    states: Folder = None
    """Recorded states, whose commonest tokens the draft can propose (default: all tokens)."""
    draft_vocab: Count = None
    """Size of the draft vocabulary; by default 32000, or all tokens if there are fewer."""
    aux_layers: Annotated[str | None, arg(metavar="L,L,L", help_behavior_hint="(optional)")] = None
    """The draft reads after these decoder layers (default: the recorded ones, or as record)."""
    intermediate_size: Count = None
    """Width of the draft's MLP; by default the policy's."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Seed of the random weights."""
    draft_kind: Literal["eagle3", "mtp", "dflash"] = "eagle3"
    """The draft's mechanism."""
    mask_token: Count = None
    """dflash: id of a token that occurs in no text, to mark the positions of proposed tokens."""
    layers: Count = None
    """dflash: number of decoder layers (default 2)."""

    def run(self) -> int:
        """Writes the draft and prints what was made."""
        from draft_trainer.checkpoints import read_policy
        from draft_trainer.drafters import DRAFTERS
        from draft_trainer.drafters.rope import Rope
        from draft_trainer.files import check_free, folder_written_whole

        at_least("--draft-vocab", self.draft_vocab, 1)
        at_least("--intermediate-size", self.intermediate_size, 1)
        layers = None if self.aux_layers is None else _layers(self.aux_layers)
        check_free(self.out, "--out")
        folder = local_folder(self.policy, "--policy")
        if self.draft_kind == "mtp":
            checkpoint = DRAFTERS["mtp"].read(folder)
            with folder_written_whole(self.out) as temporary:
                checkpoint.write(temporary)
            print(f"{self.out}: {len(checkpoint.tensors)} tensors of the policy's MTP head")
            return 0
        policy = read_policy(folder)
        made = self._dflash if self.draft_kind == "dflash" else self._eagle3
        head, told = made(policy, layers)
        told = "; ".join(filter(None, (told, Rope.of_draft(policy.config)[1])))
        with folder_written_whole(self.out) as temporary:
            DRAFTERS[head.kind].save(temporary, head)
        print(
            f"{self.out}: {sum(p.numel() for p in head.parameters()):,} parameters; auxiliary "
            f"states after layers {', '.join(map(str, head.config.aux_layer_ids))}; {told}"
        )
        return 0

    def _eagle3(
        self, policy: PolicyCheckpoint, layers: tuple[int, ...] | None
    ) -> tuple[Draft, str]:
        """The draft, and its vocabulary in words."""
        import torch
        from rich.console import Console

        from draft_trainer.checkpoints import size_of
        from draft_trainer.drafters.initial import choose_draft_vocabulary, init_draft
        from draft_trainer.offline.report import open_recording

        vocab = size_of(policy.config, "vocab_size")
        ids, chosen = torch.arange(vocab), ""
        if self.states is not None:
            recording = open_recording(self.states, Console(stderr=True))
            recording.check_policy(policy)
            layers = layers or recording.facts.aux_layer_ids
            recording.select_layers(layers)
            allowed, counts = recording.lm_head_ids(), recording.completion_token_counts()
            size = self.draft_vocab or min(DEFAULT_DRAFT_VOCAB, len(allowed))
            ids = choose_draft_vocabulary(counts, size, allowed)
            share = int(counts[ids].sum()) / max(int(counts.sum()), 1)
            chosen = f", {share:.2%} of the {int(counts.sum()):,} recorded completion tokens"
        elif self.draft_vocab not in (None, vocab):
            raise RefusedError(
                "--draft-vocab",
                self.draft_vocab,
                f"recorded states to choose the tokens by, or all {vocab} tokens",
                "give --states, or leave --draft-vocab out",
            )
        head = init_draft(
            policy,
            ids,
            aux_layer_ids=layers,
            intermediate_size=self.intermediate_size,
            seed=self.seed,
        )
        return head, f"draft vocabulary {len(ids):,} of {vocab:,} tokens{chosen}"

    def _dflash(
        self, policy: PolicyCheckpoint, layers: tuple[int, ...] | None
    ) -> tuple[Draft, str]:
        """The draft, and its depth in words."""
        from draft_trainer.drafters.initial import init_dflash

        at_least("--layers", self.layers, 1)
        for name, found in (("--draft-vocab", self.draft_vocab), ("--states", self.states)):
            if found is not None:
                expected = "nothing with --draft-kind dflash: it proposes every token"
                raise RefusedError(name, found, expected, "leave it out")
        if self.mask_token is None:
            expected = "the id of a token that no text has"
            raise RefusedError("--mask-token", "nothing", expected, "choose a reserved token")
        head = init_dflash(
            policy,
            self.mask_token,
            layers=self.layers or 2,
            aux_layer_ids=layers,
            intermediate_size=self.intermediate_size,
            seed=self.seed,
        )
        return head, f"{len(head.layers)} layers"


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise RefusedError(
            "--aux-layers", repr(text), "numbers as in 2,18,33", "separate them by commas"
        ) from error


_TRAINING = ("learning_rate", "batch_tokens", "ttt_steps", "compute_dtype")
_PLACE = ("device", "threads", "seed")
_KEYS = {
    "draft_kind": "fit.kind",
    "epochs": "fit.epochs",
    "draft_length": "fit.num_speculative_tokens",
    **{name: f"training.{name}" for name in (*_TRAINING, *_PLACE)},
}
"""Options of ``Fit`` that override a key of its configuration."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Train a draft on recorded states.

    Estimates the draft's acceptance length on held-out prompts before, during and after training,
    and keeps its best weights. Writes a draft that vLLM loads to the folder given with --out, with
    training.jsonl and training.svg. SIGTERM and SIGINT stop it after the current step. After that,
    or after a kill, it continues with --resume.
    """

    states: Needed
    """Recorded states."""
    draft: Needed
    """The initial draft, as draft-trainer init makes it, or its name on the hub."""
    out: Needed
    """The trained draft; must not exist, except with --resume."""
    policy: Folder = None
    """The draft's policy; needed if the draft's checkpoint does not have all settings."""
    config: File = None
    """TOML with the sections fit and training; the options below override it."""
    resume: bool = False
    """Continue the unfinished fit in --out; start one if there is none."""
    draft_kind: Kind = None
    """The draft's mechanism: eagle3, mtp, draft_model or dflash (default eagle3)."""
    epochs: Count = None
    """Passes over the data (default 3)."""
    draft_length: Count = None
    """Speculative tokens that will be served (default 3)."""
    learning_rate: Annotated[float | None, arg(metavar="X", help_behavior_hint="(optional)")] = None
    """Learning rate after warm-up (default 1e-3)."""
    batch_tokens: Count = None
    """Tokens of one step (default 4096)."""
    ttt_steps: Count = None
    """Depth of the training-time test (default 5)."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of matrix products (default float32); weights and optimizer are always float32."""
    device: Literal["cpu", "cuda"] | None = None
    """Device of the training (default cpu)."""
    threads: Count = None
    """Threads of torch (default: torch's own)."""
    seed: Count = None
    """Seed of the data order (default 0)."""

    def run(self) -> int:
        """0: trained to the end; 128 plus the signal's number: ended by it, to be resumed."""
        import torch

        from draft_trainer.kernels.library import use_kernels
        from draft_trainer.offline.data import fit_config
        from draft_trainer.offline.fit import Fit as Training

        given = {key: getattr(self, name) for name, key in _KEYS.items()}
        options = {key: value for key, value in given.items() if value is not None}
        config = fit_config(self.config, options)
        training = config.training
        if "threads" in training.model_fields_set:
            torch.set_num_threads(training.threads)
        if training.device == "cpu":
            use_kernels(training.cpu_kernels)
        caught: list[int] = []

        def on_signal(number: int, frame: object) -> None:
            caught.append(number)
            # A second one ends it at once.
            signal.signal(number, signal.SIG_DFL)

        before = {
            number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            draft = local_folder(self.draft, "--draft")
            policy = self.policy and local_folder(self.policy, "--policy")
            fit = Training(self.states, draft, self.out, policy, config)
            done = fit.run(lambda: bool(caught), self.resume)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0 if done else 128 + (caught or [signal.SIGTERM])[0]
