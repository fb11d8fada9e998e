"""The sections that run vLLM: an engine in this process whose draft changes, and a whole server."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.gpu.bench import Bench, Figures, NotMeasuredError, draft_of
from benchmarks.gpu.sharing import policy_8b
from benchmarks.hot_swap.load import Load, Work, complete_all
from draft_trainer.drafters import DRAFTERS
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.arithmetic_grpo.tokenizer import EOS_ID
from examples.local_services import ARITHMETIC, DRAFT_LENGTH, RolloutServer
from rollout_server.control.changes import Change
from rollout_server.control.stages import WeightSource
from rollout_server.vllm import swap
from rollout_server.vllm.plugins import MARK
from rollout_server.vllm.standby import SAME
from slipstream.checkpoints import load_tensors
from tests.losslessness.joint import chi_square_p_value, exact_joint
from tests.rollout_server.checkpoints import perturbed
from tests.rollout_server.live import V2_ENV

_CALL_SECONDS = 60.0
_STOP_SECONDS = 20.0
_SAMPLED_TOKENS = 3
_KINDS = {
    "fixed": (),
    "auto": ("--speculation", "auto"),
    # Of the policy alone.
    "fp8": ("--quantization", "fp8"),
}
Tokens = tuple[int, ...]


def vllm_engine(bench: Bench) -> Figures:
    """Model Runner V2 with asynchronous scheduling, whose draft changes between a request's steps.

    On a CPU its kernels run in Triton's interpreter (tests/runner_v2).
    """
    engine = _Engine(bench)
    runs, samples = (1, 60) if bench.tiny else (20, 4000)
    problems = [prompt_ids(problem) for problem in held_out_problems(3)]
    expected = engine.complete(problems, lambda: None)

    def differing() -> int:
        return sum(engine.complete(problems, engine.change) != expected for _ in range(runs))

    differ = differing()
    if bench.cuda:
        # As on a GPU without room for a second draft.
        swap.must_pin = lambda *_: True
        differ += differing()
    read_back = engine.call("read_back")
    policy = AutoModelForCausalLM.from_pretrained(ARITHMETIC / "policy", dtype=torch.float32)
    exact = exact_joint(policy.eval(), problems[0], _SAMPLED_TOKENS, floor=1e-6, eos=EOS_ID)
    drawn = engine.complete(problems[:1] * samples, engine.change, _SAMPLED_TOKENS, 1.0)
    return {
        "runner": engine.call("describe")[0]["runner"],
        "asynchronous": bool(engine.core.async_scheduling),
        "drafts lost in pinned swaps": sum(found != SAME for found in read_back),
        "runs that differ": differ,
        "p-value of sampled tokens": chi_square_p_value(drawn, exact),
        "runs": runs,
        "samples": samples,
        "changes": dict(engine.changes),
    }


def vllm_sleep(bench: Bench) -> Figures:
    """Sleep levels 1 and 2, after which policy and draft are loaded again, as a trainer does."""
    if not bench.cuda:
        raise NotMeasuredError("an engine on a CPU does not sleep")
    engine = _Engine(bench, enable_sleep_mode=True)
    problems = [prompt_ids(problem) for problem in held_out_problems(3)]
    expected = engine.complete(problems, lambda: None)
    figures: Figures = {"sleeps that changed output": 0}
    for level in (1, 2):
        engine.llm.sleep(level)
        asleep = engine.call("read_back")
        engine.llm.wake_up()
        figures[f"read_back_{level}"] = asleep + engine.call("read_back")
        if level == 2:
            engine.load_again()
        figures[f"read_back_{level}"] += engine.call("read_back")
        figures["sleeps that changed output"] += (
            engine.complete(problems, engine.change) != expected
        )
    return figures


class _Engine:
    """vLLM in this process, with the example's policy and draft; ``changes`` counts by kind.

    ``options`` are more of ``LLM``'s.
    """

    def __init__(self, bench: Bench, **options: Any) -> None:
        env = {**V2_ENV, "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", MARK: "1"}
        folders = env.pop("PYTHONPATH").split(os.pathsep)
        if bench.cuda:
            del env["TRITON_INTERPRET"]
        else:
            sys.path += folders
            env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ |= env
        for name in ("vllm", "triton"):
            if find_spec(name) is None:
                raise NotMeasuredError(f"{name} is not installed; for a CPU, make test installs it")
        from vllm import LLM

        k = DRAFT_LENGTH
        drafting = {
            "method": "eagle3",
            "model": str(ARITHMETIC / "draft"),
            "num_speculative_tokens": k,
            "draft_sample_method": "probabilistic",
            # Steps without drafts get graphs of their own.
            "num_speculative_tokens_per_batch_size": [[1, 1, k], [2, 2, 0], [3, 1 << 20, k]],
        }
        self.llm: Any = LLM(
            str(ARITHMETIC / "policy"),
            # So that the distribution that torch computes is the engine's own.
            dtype="float32",
            enforce_eager=not bench.cuda,
            max_num_seqs=4 if bench.tiny else 64,
            max_model_len=128,
            max_num_batched_tokens=1024,
            disable_log_stats=False,
            async_scheduling=True,
            generation_config="vllm",
            gpu_memory_utilization=0.5,
            speculative_config=drafting,
            **options,
        )
        self._engine: Any = self.llm.llm_engine
        self.core: Any = self._engine.engine_core.engine_core
        self._drafts = [WeightSource(str(ARITHMETIC / "draft")), self._another(bench.folder)]
        self._policy = WeightSource(str(ARITHMETIC / "policy"))
        self._random, self._on, self._requests = random.Random(3), True, 0
        self.changes: Counter[str] = Counter()

    def _another(self, folder: Path) -> WeightSource:
        """A worse draft, in files."""
        from safetensors.torch import save_file

        there = folder / "another"
        there.mkdir()
        shutil.copy(ARITHMETIC / "draft" / "config.json", there)
        tensors = perturbed(load_tensors(ARITHMETIC / "draft"), scale=1.0, seed=1)
        save_file(tensors, there / "model.safetensors")
        return WeightSource(str(there))

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the hooks in the engine core."""
        return self.core.slipstream_call(method, list(args))

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        between: Callable[[], None],
        tokens: int = 24,
        temperature: float = 0.0,
    ) -> list[Tokens]:
        """Completions, in order; ``between`` is called before each step of the engine."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=temperature)
        names = []
        for prompt in prompts:
            self._requests += 1
            names.append(f"request-{self._requests}")
            self._engine.add_request(names[-1], {"prompt_token_ids": [*prompt]}, sampling)
        found: dict[str, Tokens] = {}
        while self._engine.has_unfinished_requests():
            between()
            for output in self._engine.step():
                if output.finished:
                    found[output.request_id] = tuple(output.outputs[0].token_ids)
        return [found[name] for name in names]

    def change(self) -> None:
        """Switch drafting, swap the draft, reload it, change the draft length, or do nothing."""
        kinds = ("switch", "swap", "reload", "length", "policy", "")
        (kind,) = self._random.choices(kinds, (30, 15, 15, 15, 7, 18))
        if kind == "switch":
            self._on = not self._on
            self.call("set_speculation", self._on, _CALL_SECONDS)
        elif kind in ("swap", "reload"):
            live, new = self._drafts
            while kind == "swap" and self.call("prepare", new.to_message(), None) == ["working"]:
                time.sleep(0.01)
            self._apply(Change("draft", new, live))
            self._drafts.reverse()
        elif kind == "length":
            length = self._random.randrange(DRAFT_LENGTH + 1)
            most = self.core.scheduler.max_num_running_reqs
            self.call("set_draft_lengths", [length] * (most + 1))
        elif kind == "policy":
            self._apply(Change("policy", self._policy, self._policy))
        self.changes[kind or "nothing"] += 1

    def load_again(self) -> None:
        """Load the policy and the live draft."""
        for change in (
            Change("policy", self._policy, self._policy),
            Change("draft", self._drafts[0], self._drafts[0]),
        ):
            self._apply(change)

    def _apply(self, change: Change) -> None:
        error = self.call("apply", [change.to_message()], _CALL_SECONDS)["error"]
        if error:
            raise RuntimeError(f"{change}: {error}")


def vllm_server(bench: Bench, kinds: Sequence[str] = ("fixed", "auto")) -> Figures:
    """A server with an 8B policy's shapes: its start, drafting on and off, swaps in flight."""
    if not bench.cuda:
        kinds = [kind for kind in kinds if kind == "fixed"]
        if not kinds:
            raise NotMeasuredError("it differs from vllm_server on a GPU alone")
    policy, draft = _folders(bench)
    tensors = load_tensors(draft)
    options = ["--num-gpu-blocks-override", "384"]
    if bench.cuda:
        options = ["--no-enforce-eager", "--max-model-len", "1024"]
    figures: Figures = {"draft_bytes": sum(tensor.nbytes for tensor in tensors.values())}
    for kind in kinds:
        log = bench.folder / f"{kind}.log"
        server = RolloutServer(log, *options, *_KINDS[kind], policy=policy, draft=draft)
        server.service.start()
        try:
            seconds = server.service.wait_ready(bench.seconds_left - _STOP_SECONDS)
            figures[f"start_seconds_{kind}"] = seconds
            if kind != "auto":
                figures |= _drafting(bench, server) | _swaps(bench, server, tensors)
        finally:
            server.stop()
            sys.stderr.write(log.read_text(errors="replace")[-4000:])
    return figures


def _folders(bench: Bench) -> tuple[Path, Path]:
    """The policy's folder, whose weights are zeros that take no space on disk, and the draft's.

    Weights that vLLM makes up ("dummy") leave the draft without its own lm_head.
    """
    policy, draft = bench.folder / "served-policy", ARITHMETIC / "draft"
    if bench.tiny:
        config = Qwen3Config.from_pretrained(ARITHMETIC / "policy")
    else:
        draft = bench.folder / "served-draft"
        draft.mkdir()
        DRAFTERS["eagle3"].save(draft, draft_of(bench.case, torch.device("cpu")))
        config = Qwen3Config(**policy_8b(layers=36), architectures=["Qwen3ForCausalLM"])
        config.dtype = torch.bfloat16
    config.save_pretrained(policy)
    words = models.WordLevel({str(i): i for i in range(config.vocab_size)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(policy)
    with torch.device("meta"):
        tensors = Qwen3ForCausalLM(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (policy / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return policy, draft


def _prompts(count: int) -> list[list[int]]:
    return [prompt_ids(problem) for problem in held_out_problems(count)]


def _drafting(bench: Bench, server: RolloutServer) -> Figures:
    """Milliseconds a token of each request, by requests at once, without and with drafts."""
    found: dict[str, dict[int, float]] = {"off": {}, "on": {}}
    for requests in (1, 4) if bench.tiny else (1, 8, 64):
        for name in ("off", "on"):
            server.speculate(name == "on")
            prompts = _prompts(requests)
            complete_all(server.http, prompts, requests)
            begin = time.perf_counter()
            tokens = sum(map(len, complete_all(server.http, prompts, requests)))
            found[name][requests] = 1e3 * (time.perf_counter() - begin) * requests / tokens
    return {"ms_a_token": found}


def _swaps(bench: Bench, server: RolloutServer, tensors: Mapping[str, torch.Tensor]) -> Figures:
    """Swaps between two drafts while requests run."""
    count, in_flight = (4, 4) if bench.tiny else (200, 64)
    prompts = _prompts(in_flight)
    plain = complete_all(server.http, prompts, in_flight)
    drafts = [tensors, perturbed(tensors, scale=1.0, seed=1)]
    until = time.monotonic() + bench.seconds_left / 2  # Then another server starts.
    load = Load(Work((server.http,), prompts, plain, in_flight, _SAMPLED_TOKENS))
    stage, commit, worker = [], [], []
    not_prepared = set()
    try:
        for number in range(1, count + 1):
            result = server.stage("draft", f"draft-{number}", number, drafts[number % 2])
            stage.append(result.seconds)
            not_prepared.add(result.not_prepared)
            answer = server.commit(f"draft-{number}")
            commit.append(answer.seconds)
            worker.append(answer.worker_seconds)
            if time.monotonic() > until:
                break
    finally:
        (seen,) = load.stop()
    gaps = sorted(seconds for _, seconds in seen.chunks)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "swaps": len(commit),
        "first_stage_seconds": stage[0],
        "stage_seconds": _median(stage[1:]),
        "stage_bytes_a_second": nbytes / _median(stage[1:]),
        "commit_ms": 1e3 * _median(commit),
        "ms without a step in a commit": 1e3 * _median(worker),
        "longest_ms_without_a_step": 1e3 * max(worker),
        "p99_gap_ms": 1e3 * gaps[len(gaps) * 99 // 100] if gaps else None,
        "requests that failed": len(seen.failed),
        "greedy": seen.greedy,
        # A policy of zeros takes the first token always; vllm_engine compares a real one.
        "greedy_different": seen.different,
        "not_prepared": sorted(not_prepared - {""}),
    }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
