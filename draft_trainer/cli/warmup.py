"""``draft-trainer warmup``: a draft for a policy, trained on the policy's own rollouts."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from draft_trainer.cli.init import layers_of
from draft_trainer.cli.trainer import Count, ExtraNorm, File, Folder, Needed, at_least
from slipstream.errors import RefusedError
from slipstream.hub import local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draft_trainer.drafters import Draft
    from draft_trainer.warmup.rollouts import Reading, Rollouts

_SECTIONS = ("training", "replay", "gate", "publish")
_FLEET = ("num_speculative_tokens", "draft_sample_method")
_LEFT_OUT = "it is set by warmup itself; leave it out"


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Train a draft on a policy's rollouts before the first RL step.

    The rollouts come from the file given with --rollouts, or are generated from --prompts by the
    OpenAI-compatible vLLM server at --endpoint, which must serve the same policy. That server
    samples at --temperature alone, whatever the policy's generation_config.json says. They go
    through the policy here, and its states to a trainer in this process: nothing is recorded.

    Without --tokens and --until-flat, every rollout is trained on replay.max_epochs times. The
    folder given with --out is a draft that vLLM loads at any time: the best one so far, with
    acceptance.json and acceptance.png. SIGTERM and SIGINT stop it; after that, or after a kill, the
    same command goes on.
    """

    policy: Needed
    """The policy: a Hugging Face checkpoint, or its name on the hub."""
    out: Needed
    """The draft; must not exist, unless a warm-up with the same inputs began there."""
    rollouts: File = None
    """File with one {"prompt": [token ids], "completion": [token ids]} per line."""
    prompts: File = None
    """File with one {"prompt": "text"}, {"prompt": [token ids]} or {"messages": [...]} per line."""
    endpoint: Annotated[str | None, arg(metavar="URL", help_behavior_hint="(optional)")] = None
    """http://HOST:PORT of the server that completes --prompts."""
    model: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(optional)")] = None
    """The policy's name on that server; by default the value of --policy."""
    samples: Annotated[int, arg(metavar="N")] = 1
    """Completions of each prompt, before the prompts are gone through again."""
    max_tokens: Annotated[int, arg(metavar="N")] = 1024
    """Maximum tokens of a completion."""
    temperature: Annotated[float, arg(metavar="X")] = 1.0
    """Sampling temperature of the rollouts; above 0."""
    tokens: Count = None
    """Stop after training on N completion tokens, every pass counted; prompts are repeated."""
    until_flat: bool = False
    """Stop when the held-out acceptance length no longer rises; prompts are repeated."""
    draft: Folder = None
    """The draft to begin with, or its name on the hub; by default as draft-trainer init makes it,
    with the commonest tokens of the first rollouts as its vocabulary."""
    draft_kind: Literal["eagle3", "mtp", "draft_model", "dflash", "dspark"] = "eagle3"
    """The draft's mechanism; others than eagle3 need --draft."""
    draft_vocab: Count = None
    """Without --draft: size of the draft vocabulary; by default the smallest multiple of 1024 that
    covers 99.9 % of the tokens of prompts that did not choose it, and at most 32000."""
    aux_layers: Annotated[str | None, arg(metavar="L,L,L", help_behavior_hint="(optional)")] = None
    """Without --draft: the draft reads after these decoder layers."""
    intermediate_size: Count = None
    """Without --draft: width of the draft's MLP; by default the policy's."""
    norms: tuple[ExtraNorm, ...] = ()
    """Without --draft: further norms of the draft, as draft-trainer init."""
    config: File = None
    """TOML with the trainer's sections training, replay, gate and publish (how it will draft)."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Seed of a new draft's weights and of the order of rollouts."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the policy's weights. auto: that of its checkpoint, but float32 for bfloat16 on a CPU
    that computes faster in it (x86-64 without AVX-512)."""
    device: Annotated[str, arg(metavar="DEVICE")] = "cpu"
    """The device of policy and draft: cpu, cuda, cuda:1."""

    def run(self) -> int:
        """0: trained to the end; 128 plus the signal's number: ended by it, to be continued."""
        from rich.console import Console
        from transformers import AutoTokenizer

        from draft_trainer.checkpoints import read_policy_config, size_of
        from draft_trainer.warmup.report import say
        from draft_trainer.warmup.run import Goal, is_finished
        from draft_trainer.warmup.run import Warmup as Run

        self._check_options()
        # The trainer's diagnosis is about a fleet that it serves.
        logging.getLogger("draft_trainer.server.diagnosis").setLevel(logging.ERROR)
        console = Console(stderr=True)
        if is_finished(self.out):
            say(console, f"{self.out} is finished")
            return 0
        folder = local_folder(self.policy, "--policy")
        vocab_size = size_of(read_policy_config(folder), "vocab_size")
        sections = self._sections(folder)
        self._check_device()
        rollouts = self._rollouts(AutoTokenizer.from_pretrained(folder), vocab_size)
        goal = Goal(self.tokens, self.until_flat)
        warmup = Run(self.out, sections, rollouts, goal, console)
        rollouts.check()
        model = self._loaded(folder)
        with _signals() as caught:
            tell = partial(say, console)
            make = partial(self._draft, folder, tell)
            done = warmup.run(model, make, lambda: bool(caught))
        if not done:
            say(console, f"{self.out}: stopped; the same command goes on")
            return 128 + caught[0]
        print(f"{self.out}: {warmup.outcome}")
        return 0

    def _check_options(self) -> None:
        for option in ("samples", "max_tokens", "tokens", "draft_vocab", "intermediate_size"):
            at_least(f"--{option.replace('_', '-')}", getattr(self, option), 1)
        at_least("--temperature", self.temperature, 1e-3)
        if self.tokens is not None and self.until_flat:
            raise RefusedError("--tokens", "--until-flat too", "one of them", "leave one out")
        if (self.rollouts is None) == (self.prompts is None):
            found = "none or both of --rollouts and --prompts"
            next_step = "give --rollouts FILE, or --prompts FILE with --endpoint URL"
            raise RefusedError("--rollouts", found, "one of them", next_step)
        http = self.endpoint is not None and self.endpoint.startswith(("http://", "https://"))
        if self.prompts is not None and not http:
            found, next_step = self.endpoint or "nothing", "name the server that completes them"
            raise RefusedError("--endpoint", found, "http://HOST:PORT with --prompts", next_step)
        if self.draft is None and self.draft_kind != "eagle3":
            next_step = f"make one with draft-trainer init --draft-kind {self.draft_kind}"
            raise RefusedError("--draft", "nothing", f"a {self.draft_kind} draft", next_step)
        if self.draft is not None:
            for name in ("draft_vocab", "aux_layers", "intermediate_size", "norms"):
                if getattr(self, name) not in (None, ()):
                    field, expected = f"--{name.replace('_', '-')}", "nothing with --draft"
                    raise RefusedError(field, getattr(self, name), expected, "leave it out")

    def _check_device(self) -> None:
        import torch

        try:
            torch.empty(0, device=self.device)
        except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts
            found = f"{self.device} ({str(error).partition(chr(10))[0]})"
            next_step = "name one; for a GPU, install a torch with CUDA (nvidia-smi lists GPUs)"
            raise RefusedError("--device", found, "a device of this torch", next_step) from error
        if self.device.startswith("cuda"):
            # Where the draft is, too.
            torch.cuda.set_device(torch.device(self.device).index or 0)

    def _sections(self, policy: Path) -> dict[str, dict[str, Any]]:
        """The trainer's configuration: the file's sections over what suits a warm-up."""
        import torch

        from draft_trainer.config_file import parse_config, read_toml

        given: dict[str, Any] = {} if self.config is None else read_toml(self.config)
        for name, section in given.items():
            if name not in _SECTIONS or not isinstance(section, dict):
                expected = f"sections: {', '.join(_SECTIONS)}"
                raise RefusedError(f"--config: {name}", "it", expected, _LEFT_OUT)
        for name in given.get("publish", {}):
            if name not in _FLEET:
                expected = f"no server; of publish only {' and '.join(_FLEET)}"
                raise RefusedError(f"--config: publish.{name}", "it", expected, _LEFT_OUT)
        device = "cuda" if self.device.startswith("cuda") else "cpu"
        own: dict[str, dict[str, Any]] = {
            "draft": {"kind": self.draft_kind, "policy": str(policy)},
            "training": {
                **{"threads": torch.get_num_threads(), "device": device, "seed": self.seed}
            },
            "economy": {"mode": "always"},
        }
        own |= {name: own.get(name, {}) | given.get(name, {}) for name in _SECTIONS}
        # Wrong keys are named before anything is read.
        parse_config(own | {"draft": own["draft"] | {"initial": "draft"}})
        return own

    def _rollouts(self, tokenizer: Any, vocab_size: int) -> Rollouts:
        from draft_trainer.warmup.rollouts import PLAIN, Endpoint, Prompts, RolloutFile

        if self.rollouts is not None:
            return RolloutFile(
                self.rollouts,
                vocab_size,
                tokenizer,
                temperature=self.temperature,
                seed=self.seed,
            )
        assert self.prompts is not None and self.endpoint is not None
        sampling = {**PLAIN, "max_tokens": self.max_tokens, "temperature": self.temperature}
        endpoint = Endpoint(self.endpoint.rstrip("/"), self.model or str(self.policy), sampling)
        endless = self.until_flat or self.tokens is not None
        return Prompts(
            *(self.prompts, tokenizer, vocab_size, endpoint),
            samples=self.samples,
            seed=self.seed,
            endless=endless,
        )

    def _loaded(self, folder: Path) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        from draft_trainer.drafters.ops import cpu_precision

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
            if (self.dtype, self.device, model.dtype) == ("auto", "cpu", torch.bfloat16):
                model = model.to(getattr(torch, cpu_precision()))
            return model.to(self.device).eval()  # type: ignore[no-any-return]
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().partition("\n")[0]
            expected = "a causal language model that transformers loads there"
            next_step = (
                "give its folder as save_pretrained writes it, and a --device with enough memory"
            )
            raise RefusedError("--policy", f"{folder} ({first})", expected, next_step) from error

    def _draft(self, policy: Path, tell: Callable[[str], None], reading: Reading) -> Draft:
        """The draft to begin with."""
        from draft_trainer.checkpoints import read_policy
        from draft_trainer.drafters import DRAFTERS
        from draft_trainer.warmup.vocabulary import new_draft

        if self.draft is not None:
            folder = local_folder(self.draft, "--draft")
            checkpoint = DRAFTERS[self.draft_kind].read(folder, policy)
            if checkpoint.told:
                tell(checkpoint.told)
            return checkpoint.draft()
        layers = None if self.aux_layers is None else layers_of(self.aux_layers)
        return new_draft(
            read_policy(policy),
            reading,
            size=self.draft_vocab,
            most_tokens=self.tokens,
            tell=tell,
            aux_layer_ids=layers,
            intermediate_size=self.intermediate_size,
            norms=self.norms,
            seed=self.seed,
        )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT for the length of a ``with`` block; a second one ends the process
    at once."""
    caught: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    before: dict[int, Any] = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
