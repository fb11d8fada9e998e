"""The joint of the first tokens of thousands of samples, and greedy outputs, on both runners.

Null: the server draws from the policy's exact distribution at T = 1. Each test refuses it at
p < 1e-4, so a correct server fails one run in 10,000 per test. Power: vLLM's CPU sampler bug
(``rollout_server.vllm.patches``) puts the joint at 0.42 in total variation, p < 1e-300.

The joint sees four tokens of one prompt; the sums of surprise (``joint.Surprise``) see every token
of whole completions of many prompts, with a false-alarm rate of 2e-4 per test.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from tests.rollout_server.live import V2_SLOW, Live

pytestmark = pytest.mark.contract("lossless")

PER_REQUEST = 64
TOKENS = 4
ALPHA = 1e-4


@dataclass(frozen=True)
class Sizes:
    """The sizes of the samples; smaller with Model Runner V2, which is interpreted.

    Attributes:
        joint: samples of the joint of ``TOKENS`` tokens.
        hotter: a temperature whose joint and whose surprise are refused.
        prompts: whose completions are sampled whole.
        completions: of each of these.
    """

    joint: int
    hotter: float
    prompts: int
    completions: int


SIZES = {"V1": Sizes(6_144, 1.15, 64, 4), "V2": Sizes(512, 1.5, 16, 2)}


@pytest.fixture(scope="module")
def policy(policy_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()


@pytest.fixture
def sizes(live: Live) -> Sizes:
    return SIZES[live.runner]


def sample_joint(server: Live, prompt: list[int], samples: int) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda _: server.complete(prompt, n=PER_REQUEST, max_tokens=TOKENS, temperature=1.0),
            range(samples // PER_REQUEST),
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
    return [prompt_ids(problem) for problem in held_out_problems(64)]


@pytest.fixture(scope="module")
def exact(policy: PreTrainedModel, prompts: list[list[int]]) -> dict[tuple[int, ...], float]:
    joint = exact_joint(policy, prompts[0], TOKENS, floor=1e-6, eos=EOS_ID)
    assert sum(joint.values()) > 0.98
    # A distribution with one likely outcome would test nothing.
    assert max(joint.values()) < 0.5
    return joint


@V2_SLOW
@pytest.mark.vllm
def test_sampled_joint_matches_policy_while_speculating(
    live: Live, sizes: Sizes, prompts: list[list[int]], exact: dict[tuple[int, ...], float]
) -> None:
    before = live.state()
    assert before.speculation_enabled
    assert before.draft_sample_method == "probabilistic"
    samples = sample_joint(live, prompts[0], sizes.joint)
    assert len(samples) == sizes.joint
    assert chi_square_p_value(samples, exact) > ALPHA


@V2_SLOW
@pytest.mark.vllm
def test_sampled_joint_matches_policy_under_swaps(
    live: Live,
    sizes: Sizes,
    prompts: list[list[int]],
    exact: dict[tuple[int, ...], float],
    draft_tensors: dict[str, torch.Tensor],
) -> None:
    with Swapper(live, draft_tensors) as swapper:
        samples = sample_joint(live, prompts[0], sizes.joint)
    assert len(samples) == sizes.joint
    assert swapper.swaps >= 10
    assert chi_square_p_value(samples, exact) > ALPHA


@pytest.mark.parametrize("runner", SIZES)
def test_chi_square_detects_hotter_policy(exact: dict[tuple[int, ...], float], runner: str) -> None:
    """The same number of samples of a policy that is slightly off is refused."""
    sizes, keys = SIZES[runner], list(exact)
    mass = torch.tensor([exact[key] for key in keys], dtype=torch.float64)
    hotter = mass ** (1 / sizes.hotter)
    drawn = torch.multinomial(
        hotter, sizes.joint, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    assert chi_square_p_value([keys[index] for index in drawn.tolist()], exact) < ALPHA


def sample_whole(
    server: Live, prompts: list[list[int]], each: int
) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Prompts and whole completions at temperature 1, one of the other by index."""
    with ThreadPoolExecutor(16) as pool:
        parts = pool.map(
            lambda prompt: server.complete(
                prompt, n=each, max_tokens=MAX_COMPLETION_TOKENS, temperature=1.0
            ),
            prompts,
        )
        completions = [row for part in parts for row in part]
    return [prompt for prompt in prompts for _ in range(each)], completions


@V2_SLOW
@pytest.mark.vllm
def test_sampled_tokens_are_as_surprising_as_policy_says(
    live: Live,
    sizes: Sizes,
    policy: PreTrainedModel,
    prompts: list[list[int]],
    draft_tensors: dict[str, torch.Tensor],
) -> None:
    given, each = prompts[: sizes.prompts], sizes.completions
    steady = surprise(policy, *sample_whole(live, given, each))
    assert steady.tokens > 20 * len(given) * each
    assert steady.worst < Z_BOUND, steady
    with Swapper(live, draft_tensors) as swapper:
        swapping = surprise(policy, *sample_whole(live, given, each))
    assert swapper.swaps >= 2
    assert swapping.worst < Z_BOUND, swapping


@pytest.mark.parametrize("runner", SIZES)
def test_surprise_detects_hotter_policy(
    policy: PreTrainedModel, prompts: list[list[int]], runner: str
) -> None:
    """The policy's own completions pass, and as many hotter ones do not."""
    sizes = SIZES[runner]
    given = prompts[: sizes.prompts] * sizes.completions
    for temperature, passes in ((1.0, True), (sizes.hotter, False)):
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


@V2_SLOW
@pytest.mark.vllm
def test_greedy_output_unchanged_while_speculating(
    live: Live,
    prompts: list[list[int]],
    draft_tensors: dict[str, torch.Tensor],
) -> None:
    some = prompts[: max(3, len(live.batch) // 2)]
    live.speculate(False)
    plain = greedy(live, some)
    live.speculate(True)
    speculating = greedy(live, some)
    rounds = []
    with Swapper(live, draft_tensors) as swapper:
        # A swap waits for a machine that is busy; the requests do not.
        while not rounds or (swapper.swaps < 2 and swapper.error is None):
            rounds.append(greedy(live, some))
    assert len(plain) == len(some)
    assert speculating == plain
    assert all(swapping == plain for swapping in rounds)
    assert swapper.swaps >= 2
