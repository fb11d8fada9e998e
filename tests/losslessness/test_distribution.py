"""The joint of the first four tokens over at least 20,000 samples, and greedy outputs.

Null: the server draws from the policy's exact distribution at T = 1. Each test refuses it at
p < 1e-4, so a correct server fails one run in 10,000 per test. Power: vLLM's CPU sampler bug
(``rollout_server.vllm_patches``) puts the joint at 0.42 in total variation, p < 1e-300.

The joint sees four tokens of one prompt; the sums of surprise (``joint.Surprise``) see every token
of whole completions of many prompts, with a false-alarm rate of 2e-4 per test.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids, sample
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS
from examples.arithmetic_grpo.tokenizer import EOS_ID
from slipstream.errors import RefusedError
from tests.losslessness.joint import Z_BOUND, chi_square_p_value, exact_joint, surprise
from tests.rollout_server.live import Live

SAMPLES = 20_480
PER_REQUEST = 64
TOKENS = 4
ALPHA = 1e-4
GREEDY_PROMPTS = 32
WHOLE_PROMPTS, WHOLE_SAMPLES = 64, 8


@pytest.fixture(scope="module")
def policy(policy_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()


def sample_joint(server: Live, prompt: list[int]) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda _: server.complete(prompt, n=PER_REQUEST, max_tokens=TOKENS, temperature=1.0),
            range(SAMPLES // PER_REQUEST),
        )
        return [row for part in parts for row in part]


class Swapper:
    """Swaps a good and a ruined draft in turn for as long as the context lasts."""

    def __init__(self, server: Live, good: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        ruined = {
            name: tensor
            if tensor.dtype in (torch.int64, torch.bool)
            else (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)
            for name, tensor in good.items()
        }
        self._server, self._drafts = server, {0: good, 1_000_001: ruined}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.swaps = 0
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.05):
                version = (1_000_001, 0)[self.swaps % 2]
                self._server.swap(version, self._drafts[version])
                self.swaps += 1
        except (grpc.RpcError, RefusedError) as error:
            self.error = error  # carried to the test's own thread

    def __enter__(self) -> Swapper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._server.swap(0, self._drafts[0])
        if self.error:
            raise self.error


@pytest.fixture(scope="module")
def draft_tensors(draft_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(draft_dir / "model.safetensors")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt_ids(problem) for problem in held_out_problems(WHOLE_PROMPTS)]


@pytest.fixture(scope="module")
def exact(policy: PreTrainedModel, prompts: list[list[int]]) -> dict[tuple[int, ...], float]:
    joint = exact_joint(policy, prompts[0], TOKENS, floor=1e-6, eos=EOS_ID)
    assert sum(joint.values()) > 0.98
    # A distribution with one likely outcome would test nothing.
    assert max(joint.values()) < 0.5
    assert sum(p * SAMPLES >= 10 for p in joint.values()) >= 20
    return joint


@pytest.mark.vllm
def test_the_joint_of_four_tokens_is_exact_while_speculating(
    server: Live, prompts: list[list[int]], exact: dict[tuple[int, ...], float]
) -> None:
    before = server.state()
    assert before.speculation_enabled
    assert before.draft_sample_method == "probabilistic"
    samples = sample_joint(server, prompts[0])
    assert len(samples) == SAMPLES
    assert chi_square_p_value(samples, exact) > ALPHA


@pytest.mark.vllm
def test_the_joint_of_four_tokens_is_exact_under_live_swaps(
    server: Live,
    prompts: list[list[int]],
    exact: dict[tuple[int, ...], float],
    draft_tensors: dict[str, torch.Tensor],
) -> None:
    with Swapper(server, draft_tensors) as swapper:
        samples = sample_joint(server, prompts[0])
    assert len(samples) == SAMPLES
    assert swapper.swaps >= 10
    assert chi_square_p_value(samples, exact) > ALPHA


def test_the_test_has_power(exact: dict[tuple[int, ...], float]) -> None:
    """The same test refuses samples from a policy that is slightly off: 10 % hotter."""
    keys = list(exact)
    mass = torch.tensor([exact[key] for key in keys], dtype=torch.float64)
    hotter = mass**0.9
    drawn = torch.multinomial(
        hotter, SAMPLES, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    assert chi_square_p_value([keys[index] for index in drawn.tolist()], exact) < ALPHA


def sample_whole(
    server: Live, prompts: list[list[int]]
) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Prompts and whole completions at temperature 1, one of the other by index."""
    with ThreadPoolExecutor(16) as pool:
        parts = pool.map(
            lambda prompt: server.complete(
                prompt, n=WHOLE_SAMPLES, max_tokens=MAX_COMPLETION_TOKENS, temperature=1.0
            ),
            prompts,
        )
        completions = [row for part in parts for row in part]
    return [prompt for prompt in prompts for _ in range(WHOLE_SAMPLES)], completions


@pytest.mark.vllm
def test_every_token_is_as_surprising_as_the_policy_says(
    server: Live,
    policy: PreTrainedModel,
    prompts: list[list[int]],
    draft_tensors: dict[str, torch.Tensor],
) -> None:
    steady = surprise(policy, *sample_whole(server, prompts))
    assert steady.tokens > 20 * WHOLE_PROMPTS * WHOLE_SAMPLES
    assert steady.worst < Z_BOUND, steady
    with Swapper(server, draft_tensors) as swapper:
        swapping = surprise(policy, *sample_whole(server, prompts))
    assert swapper.swaps >= 2
    assert swapping.worst < Z_BOUND, swapping


def test_surprise_has_power(policy: PreTrainedModel, prompts: list[list[int]]) -> None:
    """It passes the policy's own samples and refuses 10 % hotter ones."""
    given = prompts * WHOLE_SAMPLES
    for temperature, passes in ((1.0, True), (1.1, False)):
        generator = torch.Generator().manual_seed(0)
        drawn = sample(policy, given, temperature, generator=generator)
        found = surprise(policy, given, drawn.completions)
        assert (found.worst < Z_BOUND) is passes, found


def greedy(server: Live, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(32) as pool:
        return list(
            pool.map(
                lambda prompt: server.complete(prompt, max_tokens=96, temperature=0.0)[0], prompts
            )
        )


@pytest.mark.vllm
def test_greedy_outputs_are_those_without_speculation(
    server: Live,
    prompts: list[list[int]],
    draft_tensors: dict[str, torch.Tensor],
) -> None:
    some = prompts[:GREEDY_PROMPTS]
    server.speculate(False)
    plain = greedy(server, some)
    server.speculate(True)
    speculating = greedy(server, some)
    rounds = []
    with Swapper(server, draft_tensors) as swapper:
        # A swap waits for a machine that is busy; the requests do not.
        while not rounds or (swapper.swaps < 2 and swapper.error is None):
            rounds.append(greedy(server, some))
    assert len(plain) == GREEDY_PROMPTS
    assert speculating == plain
    assert all(swapping == plain for swapping in rounds)
    assert swapper.swaps >= 2
