"""GLM's MTP head, whose block is a mixture of experts, on real vLLM: swaps, and what replay says.

The example's policy is written as the GLM-4.5 model that it is: the experts of its last layer are
copies of that layer's MLP. Tolerance and rollouts are those of ``test_replay``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.mtp import CORRECTION
from examples.arithmetic_grpo.make_mtp import new_head
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.local_services import ARITHMETIC
from slipstream.v1 import rollout_server_pb2 as pb
from tests.alignment.test_replay import ROLLOUTS, assert_replay
from tests.rollout_server.checkpoints import load, perturbed
from tests.rollout_server.live import Live, RefusedError, prompts, swap_many

pytestmark = pytest.mark.vllm
EXPERTS, SWAPS = 4, 8


def as_glm(policy: Path, out: Path) -> Path:
    """Write the example's Qwen3 checkpoint as GLM's into a new folder; answers the folder."""
    config = json.loads((policy / "config.json").read_text())
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    left = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    config = {name: value for name, value in config.items() if name not in left} | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "use_qk_norm": True,
        "partial_rotary_factor": 1.0,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": 1.0},
        "first_k_dense_replace": layers - 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    }
    shutil.copytree(policy, out)
    torch.manual_seed(0)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = load_file(policy / "model.safetensors")
    at = f"model.layers.{layers - 1}.mlp."
    for part in ("gate", "up", "down"):
        matrix = tensors.pop(f"{at}{part}_proj.weight")
        for number in range(EXPERTS):
            tensors[f"{at}experts.{number}.{part}_proj.weight"] = matrix.clone()
        shared = torch.zeros_like(matrix) if part == "down" else matrix.clone()
        tensors[f"{at}shared_experts.{part}_proj.weight"] = shared
    tensors[f"{at}gate.weight"] = torch.randn(EXPERTS, config["hidden_size"])
    tensors[f"{at}gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def glm_head(policy: Path) -> Draft:
    """The example's MTP head as GLM's, with experts that differ; nothing is trained.

    GLM's attention has no gate: a half stands for it. Three quarters of the MLP's output come from
    the experts, each with more noise than the one before, and a quarter from the shared expert.
    """
    given = DRAFTERS["mtp"].read(ARITHMETIC / "mtp").draft().state_dict()
    head = new_head(policy, seed=0)
    torch.manual_seed(0)
    tensors = head.state_dict()
    for name, tensor in tensors.items():
        if "experts" in name:
            *_, number, part, _ = name.split(".")
            matrix, share = given[f"layer.mlp.{part}.weight"].float(), 0.25
            if number != "shared_experts":
                share = 0.75
                matrix = matrix + int(number) * matrix.std() * torch.randn(matrix.shape)
            tensors[name] = share * matrix if part == "down_proj" else matrix
        elif name.endswith(CORRECTION):
            tensors[name] = 0.2 * torch.randn(tensor.shape)
        elif name.endswith("q_proj.weight"):
            # The queries of each head, then their gate.
            size = len(given["layer.self_attn.q_norm.weight"])
            tensors[name] = given[name].unflatten(0, (-1, 2, size))[:, 0].flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            tensors[name] = 0.5 * given[name]
        elif ".mlp." not in name:
            # Qwen3-Next's norms are centred on 0.
            tensors[name] = given[name] + (tensor.ndim == 1)
    head.load_state_dict(tensors)
    return head


@pytest.fixture(scope="module")
def case(
    serve,  # type: ignore[no-untyped-def]
    policy_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Live, Path, Path]]:
    """A server of ``glm_head``, its policy, and the head."""
    folder = tmp_path_factory.mktemp("glm")
    policy, draft = as_glm(policy_dir, folder / "policy"), folder / "head"
    draft.mkdir()
    DRAFTERS["mtp"].save(draft, glm_head(policy), torch.float32)
    live = serve("--draft-kind", "mtp", policy=policy, draft=draft)
    yield live, policy, draft
    live.stop()


def test_swaps_with_requests_in_flight_are_lossless(case: tuple[Live, Path, Path]) -> None:
    live, _, folder = case
    batch = prompts(64)
    live.speculate(False)
    plain = live.generate(batch)
    live.speculate(True)
    draft = load(folder)
    with live.generating(batch) as rounds:
        list(swap_many(live, draft, SWAPS))
    assert all(completions == plain for completions in rounds)
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert (state.draft_version, state.draft_commits, state.not_ready) == (SWAPS, SWAPS, "")
    for name in ("lm_head.weight", "model.layers.10.shared_head.head.weight"):
        with pytest.raises(RefusedError, match=name):
            live.stage("draft", "theirs", 99, draft | {name: torch.zeros(128, 192)})


def test_push_of_same_policy_changes_nothing(case: tuple[Live, Path, Path]) -> None:
    live, folder, _ = case
    batch = prompts(16)
    before = live.generate(batch)
    weights = load_file(folder / "model.safetensors")
    live.stage("policy", "same", 1, weights)
    live.commit("same")
    assert live.generate(batch) == before


@pytest.mark.parametrize("pushed", [False, True])
def test_replay_predicts_measured_acceptance(
    case: tuple[Live, Path, Path], pushed: bool, tmp_path: Path
) -> None:
    """Of the head, after swaps; and after a push of another policy."""
    live, folder, made = case
    if pushed:
        moved = perturbed(load_file(folder / "model.safetensors"), scale=0.05, seed=3)
        live.stage("policy", "moved", 2, moved)
        live.commit("moved")
        folder = shutil.copytree(folder, tmp_path / "moved")
        save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    live.swap(SWAPS + 1 + pushed, load(made))
    tokens = [prompt_ids(problem) for problem in held_out_problems(ROLLOUTS)]
    draft = DRAFTERS["mtp"].read(made, folder).draft()
    assert_replay(live, model, draft, tokens, least=1.3)
