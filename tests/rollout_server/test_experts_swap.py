"""vLLM's GLM-4.5 MTP module, whose experts a CPU packs: a swap gives what a fresh load gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.mtp import MtpConfig, MtpHead
from rollout_server.vllm.patches import pack_experts_again
from rollout_server.vllm.served.derived import unaccounted
from rollout_server.vllm.swap import StandbyCopy, _as_first_loaded
from tests.draft_trainer.test_mtp_vllm import GLM, SIZES
from tests.rollout_server.drafts import Drafts, check_failed_commits, check_swaps, different


def fresh(releases: list[Path]) -> Drafts:
    """vLLM's module of the first release; embeddings and lm_head are the verifier's."""
    made = Drafts(releases[0], releases, "mtp")
    [layer] = made.draft.model.layers.values()  # type: ignore[union-attr,operator]
    layer.shared_head.head = made.policy.lm_head = nn.Identity()
    [experts] = [m for n, m in made.draft.named_modules() if n.endswith("routed_experts")]
    # As with expert parallelism, of which this is the only rank.
    experts._expert_map = torch.arange(experts.local_num_experts, dtype=torch.int32)  # type: ignore[arg-type]
    return made


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("glm")
    paths = [folder / str(seed) for seed in range(3)]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        head = MtpHead(MtpConfig.from_dict(SIZES | GLM))
        with torch.no_grad():
            for tensor in head.state_dict().values():
                tensor.add_(0.1 * torch.randn(tensor.shape))
        path.mkdir()
        DRAFTERS["mtp"].save(path, head)
    return paths


@pytest.fixture(scope="module")
def drafts(releases: list[Path]) -> Iterator[Drafts]:
    from vllm.distributed import cleanup_dist_env_and_memory

    yield fresh(releases)
    cleanup_dist_env_and_memory()


def test_swap_packs_experts_like_fresh_load(drafts: Drafts, releases: list[Path]) -> None:
    expected = [fresh([path]).outputs() for path in releases]
    assert any("w13_weight" in name for name in expected[0])
    assert any("e_score_correction_bias" in name for name in expected[0])
    # Every tensor of the two releases differs, so each of them was replaced.
    assert len(different(expected[0], expected[1])) == len(expected[0])
    assert unaccounted(drafts.policy, drafts.draft) == []
    [experts] = [m for n, m in drafts.draft.named_modules() if n.endswith("routed_experts")]
    check_swaps(drafts, expected, experts.w13_weight)  # type: ignore[arg-type]
    check_failed_commits(drafts)


def test_router_reads_swapped_correction_bias(drafts: Drafts) -> None:
    """Router, experts and gate have one tensor of it."""
    [gate] = [m for n, m in drafts.draft.named_modules() if n.endswith("mlp.gate")]
    [runner] = [m for n, m in drafts.draft.named_modules() if n.endswith("mlp.experts")]
    bias = gate.e_score_correction_bias
    assert runner.router.e_score_correction_bias.data_ptr() == bias.data_ptr()  # type: ignore[union-attr,operator]
    copy = StandbyCopy(drafts.policy, drafts.draft)
    copy.load(drafts.sources[1].weights())
    assert sum(one is bias for one, _ in copy.pairs()) == 1


def test_standby_copy_zeroes_padding_of_experts(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod as Method

    converted: list[torch.Tensor] = []
    monkeypatch.setattr(
        *(Method, "process_weights_after_loading"),
        lambda self, layer: converted.append(layer.w13_weight.clone()),
    )

    def load(pad: int) -> torch.Tensor:
        """w13, of the kernel's width, as it is converted."""
        copy = StandbyCopy(drafts.policy, drafts.draft)
        [metas] = [each.meta for each in copy._copied if "w13_weight" in each.meta]
        assert isinstance(metas, dict)
        meta = metas["w13_weight"]
        [count, width, hidden] = meta.shape
        assert meta.weight_loader_numel == meta.numel()
        metas["w13_weight"] = meta.new_empty(count, width + 2 * pad, hidden)
        metas["w13_weight"].__dict__ = meta.__dict__.copy()
        copy.load(drafts.sources[1].weights())
        return converted[-1]

    plain, padded = load(0), load(16)
    half = plain.shape[1] // 2
    gate, up = padded.chunk(2, dim=1)
    assert torch.equal(torch.cat([gate[:, :half], up[:, :half]], dim=1), plain)
    assert not gate[:, half:].any() and not up[:, half:].any()


def test_reload_packs_experts_again(
    drafts: Drafts, releases: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half fails on a vLLM that packs them itself: then the workaround can go."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod as Method

    expected = fresh([releases[1]]).outputs()
    drafts.reload(1)
    found = different(drafts.outputs(), expected)
    assert [name.rpartition(".")[2] for name in found] == ["w13_weight", "w2_weight"]
    monkeypatch.setattr(Method, "_setup_kernel", Method._setup_kernel)
    pack_experts_again(Method)
    drafts.reload(1)
    assert not different(drafts.outputs(), expected)
    pack_experts_again(nn.Module)  # has no such method


def test_live_experts_kernel_is_kept_while_copy_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    method = SimpleNamespace(moe_kernel="kernel", other=1)
    fresh_method = _as_first_loaded(method)
    assert vars(fresh_method) == {"moe_kernel": None, "other": 1}
    assert method.moe_kernel == "kernel", "the engine computes with it"
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert _as_first_loaded(method) is method
