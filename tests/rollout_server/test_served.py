"""Draft mechanisms on the server's side: what is refused, and what follows the policy."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from policy_bridge.sync import policy_tensors
from rollout_server.control.acceptance_counts import AcceptanceTracker
from rollout_server.control.changes import Description
from rollout_server.control.control import DRAFT, RolloutControl, Weights
from rollout_server.control.control import POLICY as POLICY_KIND
from rollout_server.control.draft_folder import Expected
from rollout_server.control.service import RolloutService, refuse_shared
from rollout_server.control.stages import StageStore, WeightSource
from rollout_server.control.upload import Upload
from rollout_server.vllm import api_server as app
from rollout_server.vllm.api_server import _expected_draft, _expected_policy
from rollout_server.vllm.plugins import Settings
from rollout_server.vllm.served import SERVED, WithoutWeights, served_by
from rollout_server.vllm.served.derived import unaccounted
from slipstream.checkpoints import TensorLayout, read_layout
from slipstream.errors import RefusedError
from slipstream.tensors import digest_of_specs, spec_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import tensor_pb2
from tests.draft_trainer.rig import open_to_all
from tests.policy_bridge.conftest import make_model

MODEL = {"model_type": "qwen3_next", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16}
HEAD = {"mtp.fc.weight": torch.zeros(8, 16), "mtp.norm.weight": torch.zeros(8)}
POLICY = {"model.embed_tokens.weight": torch.zeros(16, 8), "lm_head.weight": torch.zeros(16, 8)}


def write(directory: Path, tensors: dict[str, torch.Tensor] = HEAD, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    save_file(tensors, directory / "model.safetensors")
    return directory


def specs_of(tensors: dict[str, torch.Tensor]) -> list[tensor_pb2.TensorSpec]:
    """Return the specs in the order of the tensors."""
    return [spec_of(name, tensor) for name, tensor in tensors.items()]


def test_draft_kind_is_inferred_from_checkpoint(tmp_path: Path, draft_dir: Path) -> None:
    assert served_by(None, draft_dir).name == "eagle3"
    head = write(tmp_path / "head")
    assert served_by(None, head).name == "mtp"
    (head / "manifest.json").write_text('{"draft_kind": "eagle3"}')
    assert served_by(None, head).name == "eagle3"
    (head / "manifest.json").write_text('{"draft_kind": "medusa"}')
    with pytest.raises(RefusedError, match="medusa"):
        served_by(None, head)
    model = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8)}
    small = write(tmp_path / "small", POLICY | model, architectures=["Qwen3ForCausalLM"])
    assert served_by(None, small).name == "draft_model"
    with pytest.raises(RefusedError, match=r"a language model.*--draft-kind draft_model"):
        served_by("eagle3", small).check(write(tmp_path / "model", POLICY), small)
    # An EAGLE-3 draft of SafeAILab's trainer may have such a name, too.
    write(small, model | {"fc.weight": torch.zeros(8, 24)}, architectures=["LlamaForCausalLM"])
    assert served_by(None, small).name == "eagle3"
    for kind, architecture, other in (
        ("dflash", "DFlashDraftModel", "DFlashSpeculator"),
        ("dspark", "Qwen3DSparkModel", "DSparkDraftModel"),
    ):
        block = write(tmp_path / "block", architectures=[architecture])
        assert served_by(None, block).name == served_by(kind, block).name == kind
        with pytest.raises(RefusedError, match=f"found {architecture}, expected eagle3"):
            served_by("eagle3", block)
        write(block, architectures=[other], speculators_model_type=kind)
        assert served_by(None, block).name == kind
    for architecture in (
        "DFlash2DraftModel",
        "Gemma4DSparkModel",
        "DSparkDraftModel",
        "PEagleDraftModel",
        "EagleLlamaForCausalLM",
    ):
        write(block, architectures=[architecture])
        for kind in (None, "eagle3", "dflash"):
            with pytest.raises(RefusedError, match=f"architectures: found {architecture}"):
                served_by(kind, block)
    for kind in ("ngram", "none"):
        assert isinstance(served_by(kind, None), WithoutWeights)
    for kind in (None, "mtp"):
        with pytest.raises(RefusedError, match="--draft"):
            served_by(kind, None)


def test_mtp_check_refuses_unfit_head(tmp_path: Path) -> None:
    model, head = write(tmp_path / "model", POLICY | HEAD), write(tmp_path / "head")
    mtp = SERVED["mtp"]
    mtp.check(model, head)
    # A release of MiMo's head has a configuration that transformers knows.
    mimo = {"architectures": ["MiMoForCausalLM"]}
    mtp.check(
        write(tmp_path / "mimo", POLICY, model_type="mimo", auto_map={}, **mimo),
        write(tmp_path / "mimo_head", model_type="qwen2", **mimo),
    )
    with pytest.raises(RefusedError, match="model_type: found qwen2"):
        mtp.check(model, tmp_path / "mimo_head")
    with pytest.raises(RefusedError, match="hidden_size: found 4"):
        mtp.check(model, write(tmp_path / "narrow", hidden_size=4))
    with pytest.raises(RefusedError, match=r"2 others, such as lm_head\.weight"):
        mtp.check(model, model)
    fp8 = write(tmp_path / "fp8", POLICY, quantization_config={"quant_method": "fp8"})
    with pytest.raises(RefusedError, match=r"found quantization_config \(fp8\).*not supported"):
        mtp.check(fp8, head)
    with pytest.raises(RefusedError, match="--draft-kind ngram"):
        SERVED["ngram"].check(model, head)


def test_glm_head_is_layer_after_last_of_policy(tmp_path: Path) -> None:
    config, at = MODEL | {"model_type": "glm4_moe"}, "model.layers.2."
    head = {f"{at}eh_proj.weight": torch.zeros(8, 16), f"{at}mlp.gate.weight": torch.zeros(4, 8)}
    copy = {f"{at}shared_head.head.weight": torch.zeros(16, 8)}
    policy = POLICY | {"model.layers.1.mlp.gate.weight": torch.zeros(4, 8)}
    model = write(tmp_path / "model", policy | head | copy, model_type="glm4_moe")
    release = write(tmp_path / "head", head, model_type="glm4_moe")
    assert served_by(None, release).name == "mtp"
    mtp = SERVED["mtp"]
    mtp.check(model, release)
    with pytest.raises(RefusedError, match=r"1 others, such as model.layers.2.shared_head.head"):
        mtp.check(model, write(tmp_path / "copied", head | copy, model_type="glm4_moe"))
    layout, seen = read_layout(model), Description(True, ("lm_head.weight",), "float32")
    expected = _expected_policy(layout, seen, mtp, config)
    assert expected.layout.keys() == policy.keys()


def test_draft_model_check_refuses_other_vocabulary(tmp_path: Path) -> None:
    model, draft = write(tmp_path / "model", POLICY), write(tmp_path / "draft", POLICY)
    SERVED["draft_model"].check(model, draft)
    with pytest.raises(RefusedError, match="vocab_size: found 17"):
        SERVED["draft_model"].check(model, write(draft, POLICY, vocab_size=17))
    # A multimodal policy nests its language model's sizes.
    write(model, POLICY, vocab_size=None, llm_config={"vocab_size": 17})
    SERVED["draft_model"].check(model, draft)
    with pytest.raises(RefusedError, match="vocab_size: found None"):
        SERVED["draft_model"].check(
            write(model, POLICY, vocab_size=None), write(draft, POLICY, vocab_size=None)
        )


def test_draft_model_with_pard_token_drafts_in_parallel(tmp_path: Path) -> None:
    model, draft = write(tmp_path / "model", POLICY), write(tmp_path / "draft", POLICY)
    served = SERVED["draft_model"]
    settings = served.speculative_config(draft, 3, "greedy")
    assert settings is not None and "parallel_drafting" not in settings
    write(draft, POLICY, pard_token=3)
    served.check(model, draft)
    settings = served.speculative_config(draft, 3, "greedy")
    assert settings is not None and settings["parallel_drafting"] is True
    with pytest.raises(RefusedError, match="pard_token: found 4096"):
        served.check(model, write(draft, POLICY, pard_token=4096))


@pytest.mark.parametrize("kind", ["mtp", "draft_model"])
def test_check_refuses_path_that_names_other_method(kind: str, tmp_path: Path) -> None:
    tensors = HEAD if kind == "mtp" else POLICY
    model = write(tmp_path / "model", POLICY)
    for name, word in (("dm-DFlash-2", "dflash"), ("eagle3", "eagle3"), ("Eagle-x", "eagle-")):
        draft = write(tmp_path / name, tensors)
        with pytest.raises(RefusedError, match=f"found {word} in its path"):
            SERVED[kind].check(model, draft)
    SERVED[kind].check(model, write(tmp_path / "eagle", tensors))


def test_dflash_check_refuses_unfit_draft(tmp_path: Path) -> None:
    model, dflash = write(tmp_path / "model", POLICY), SERVED["dflash"]
    tensors = {"fc.weight": torch.zeros(8, 16), "layers.0.mlp.up_proj.weight": torch.zeros(8, 8)}
    block = {"mask_token_id": 15, "target_layer_ids": [0, 1]}

    def draft(nested: object = block, more: str = "norm.weight", **changes: object) -> Path:
        names = {"architectures": ["DFlashDraftModel"], "dflash_config": nested} | changes
        return write(tmp_path / "draft", tensors | {more: torch.zeros(8)}, **names)

    dflash.check(model, draft())
    for folder, field in (
        (
            lambda: draft(speculators_model_type="dspark"),
            "speculators_model_type: found dspark, expected dflash",
        ),
        (lambda: draft(hidden_size=4), "hidden_size: found 4"),
        (lambda: draft(vocab_size=17), "vocab_size: found 17"),
        (lambda: draft(nested=block | {"mask_token_id": 16}), "mask_token_id: found 16"),
        (lambda: draft(nested=block | {"target_layer_ids": [0, 2]}), "target_layer_ids"),
        (lambda: draft(nested=block | {"target_layer_ids": [0]}), r"fc\.weight"),
        (lambda: draft(more="lm_head.weight"), r"such as lm_head\.weight"),
    ):
        with pytest.raises(RefusedError, match=field):
            dflash.check(model, folder())
    (draft() / "mask_embedding.pt").touch()
    with pytest.raises(RefusedError, match="a pickle"):
        dflash.check(model, tmp_path / "draft")


MARKOV = {
    "markov_head.markov_w1.weight": torch.zeros(16, 2),
    "markov_head.markov_w2.weight": torch.zeros(16, 2),
    "confidence_head.proj.weight": torch.zeros(1, 10),
}


def test_dspark_check_refuses_unfit_draft(tmp_path: Path) -> None:
    model, dspark = write(tmp_path / "model", POLICY), SERVED["dspark"]
    tensors = MARKOV | {"fc.weight": torch.zeros(8, 16)}
    block = {"mask_token_id": 15, "target_layer_ids": [0, 1]}
    names = {"architectures": ["Qwen3DSparkModel"], **block}
    dspark.check(model, write(tmp_path / "draft", tensors, **names))
    gate = {"markov_head.gate_proj.weight": torch.zeros(2, 10)}
    for more, changes, field in (
        ({}, {"architectures": ["DFlashDraftModel"]}, "architectures: found"),
        ({}, {"architectures": "dspark"}, "architectures: found dspark, expected .'Qwen3DSpark"),
        ({}, {"mask_token_id": 16}, "json: mask_token_id: found 16"),
        ({}, {"target_layer_ids": [0, 2]}, "json: target_layer_ids"),
        (gate, {}, r"such as markov_head\.gate_proj"),
    ):
        draft = write(tmp_path / "draft", tensors | more, **(names | changes))
        with pytest.raises(RefusedError, match=field):
            dspark.check(model, draft)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_draft_with_own_vocabulary_has_own_lm_head(kind: str, tmp_path: Path) -> None:
    """speculators' layout: its lm_head is checked at the start and asked for by every stage."""
    model, served = write(tmp_path / "model", POLICY), SERVED[kind]
    own = {"lm_head.weight": torch.zeros(4, 8), "d2t": torch.arange(4)}
    tensors = {"fc.weight": torch.zeros(8, 16), **(MARKOV if kind == "dspark" else {})}
    around = {"draft_vocab_size": 4, "mask_token_id": 15, "aux_hidden_state_layer_ids": [1, 2]}
    names = {"architectures": ["Any"], "speculators_model_type": kind, **around}
    sizes = {"transformer_layer_config": {"hidden_size": 8, "vocab_size": 16}, "hidden_size": None}
    folder = write(tmp_path / "draft", tensors | own, **names, **sizes)
    served.check(model, folder)
    for held, changes, field in (
        (tensors | own, {"aux_hidden_state_layer_ids": [0, 1]}, "aux_hidden_state_layer_ids"),
        (tensors | own, {"speculators_model_type": "eagle3"}, f"found eagle3, expected {kind}"),
        (tensors, {}, r"lm_head\.weight: found absent"),
        (tensors | own | {"d2t": torch.full((4,), 20)}, {}, "d2t"),
        (tensors | own | {"embed_tokens.weight": torch.zeros(16, 8)}, {}, "such as embed_tokens"),
    ):
        with pytest.raises(RefusedError, match=field):
            served.check(model, write(tmp_path / "other", held, **(names | sizes | changes)))
    specs = specs_of(tensors | own)
    draft = Weights.of(DRAFT, 0, specs, StageStore(tmp_path, 1 << 20).new_folder())
    expected = _expected_draft(draft, Description(True, (), "float32"), served)
    assert expected.check(specs) == specs
    with pytest.raises(RefusedError, match=r"1 missing: lm_head\.weight"):
        expected.check([spec for spec in specs if spec.name != "lm_head.weight"])
    settings = Settings(model, folder, open_to_all(), draft_kind=kind)
    control, _ = asyncio.run(plane(settings, shares=True))
    assert "lm_head.weight" in {tensor.name for tensor in control.live[DRAFT].source.tensors}


def test_mtp_stages_separate_head_and_policy(tmp_path: Path) -> None:
    model = write(tmp_path / "model", POLICY | HEAD)
    store = StageStore(tmp_path, 1 << 20)
    specs = specs_of(HEAD)
    draft = Weights.of(DRAFT, 0, specs, store.new_folder())
    seen = Description(True, ("lm_head.weight",), "float32")
    expected = _expected_draft(draft, seen, SERVED["mtp"])
    expected.check(specs)
    for name, tensor in POLICY.items():
        with pytest.raises(RefusedError):
            expected.check([*specs, spec_of(name.removeprefix("model."), tensor)])
    # A training loop has no head: its policy is the rest of the checkpoint.
    policy = _expected_policy(read_layout(model), seen, SERVED["mtp"], MODEL)
    whole = specs_of(POLICY)
    policy.check(whole)
    with pytest.raises(RefusedError, match=r"mtp.fc.weight"):
        policy.check([*whole, specs[0]])


BUFFERS = {
    f"model.layers.0.self_attn.rotary_emb.{name}": torch.zeros(4)
    for name in ("inv_freq", "cos_cached", "sin_cached")
}


@pytest.mark.parametrize(
    ("kind", "optional"),
    [(kind, HEAD) for kind in SERVED if kind != "mtp"] + [("none", BUFFERS), ("mtp", BUFFERS)],
)
def test_policy_stage_may_omit_what_vllm_does_not_serve(
    kind: str, optional: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """An MTP head that does not draft, and the rotary buffers of an older checkpoint."""
    layout = read_layout(write(tmp_path / "model", POLICY | optional))
    seen = Description(False, (), "float32")
    expected = _expected_policy(layout, seen, SERVED[kind], MODEL)
    for tensors in (POLICY, POLICY | optional):
        specs = specs_of(tensors)
        assert expected.check(specs) == specs
    *most, last = specs
    with pytest.raises(RefusedError, match=rf"{re.escape(last.name)}\].shape"):
        expected.check([*most, spec_of(last.name, torch.zeros(2))])
    with pytest.raises(RefusedError, match=r"1 missing: model\.embed_tokens\.weight"):
        expected.check(specs[1:])


def test_text_policy_for_multimodal_checkpoint_is_refused() -> None:
    """And one that lacks a tensor of a tower that it has is told of the tensor."""
    names = ["model.visual.merger.weight", "model.visual.proj.weight", "model.norm.weight"]
    expected = Expected("policy", dict.fromkeys(names, TensorLayout("float32", (2,))), "float32")
    specs = {name: spec_of(name, torch.zeros(2)) for name in names}
    with pytest.raises(RefusedError, match=r"2 missing.*AutoModelForImageTextToText"):
        expected.check([specs["model.norm.weight"]])
    for absent in ("model.norm.weight", "model.visual.proj.weight"):
        with pytest.raises(RefusedError, match="name every tensor of the checkpoint"):
            expected.check([spec for name, spec in specs.items() if name != absent])


async def plane(
    settings: Settings, tied: tuple[str, ...] = (), shares: bool = False
) -> tuple[RolloutControl, RolloutService]:
    """A control plane over an engine that is asked no more than what it serves."""

    class Describes:
        async def describe(self) -> Description:
            return Description(shares, (), "bfloat16", tied=tied)

    control, service = await app.control_plane(
        Describes(),  # type: ignore[arg-type]
        StageStore(settings.model_dir, 1 << 24),
        settings,
        *(read_layout(settings.model_dir), AcceptanceTracker()),
        lambda *_: None,
    )
    service.workers.close()
    return control, service


def staged(
    folder: Path, tied: tuple[str, ...], tensors: dict[str, torch.Tensor]
) -> tuple[list[str], bool]:
    """Return the names that are kept of a pushed policy, and whether lm_head is asked for."""

    async def begin() -> tuple[Weights, Upload]:
        settings = Settings(folder, None, open_to_all(), draft_kind="none")
        _, service = await plane(settings, tied)
        specs = specs_of(tensors)
        header = pb.StageHeader(stage_id="policy-1", version=1, tensors=specs)
        weights, upload = await service._begin(header, POLICY_KIND)
        assert upload is not None
        return weights, upload

    weights, upload = asyncio.run(begin())
    with upload.opened():
        missing = {*upload.missing}
    return [tensor.name for tensor in weights.source.tensors], "lm_head.weight" in missing


@pytest.mark.parametrize("stored", [False, True])
def test_tied_policy_stage_with_and_without_lm_head(stored: bool, tmp_path: Path) -> None:
    """Gathered on the host, or tensor by tensor, its lm_head has memory of its own."""
    model = make_model(tied=True)
    plain = policy_tensors(model, "bfloat16")
    gathered = policy_tensors({n: t.clone() for n, t in model.state_dict().items()}, "bfloat16")
    assert gathered.keys() - plain.keys() == {"lm_head.weight"}
    folder = write(tmp_path / "model", gathered if stored else plain)
    for pushed in (plain, gathered):
        assert staged(folder, ("policy",), pushed) == (sorted(plain), False)
    torn = gathered | {"lm_head.weight": gathered["lm_head.weight"] + 1}
    with pytest.raises(RefusedError, match=r"lm_head\.weight\].sha256.*embed_tokens.*one matrix"):
        staged(folder, ("policy",), torn)
    with pytest.raises(RefusedError, match=r"lm_head\.weight\].shape"):
        staged(folder, ("policy",), gathered | {"lm_head.weight": torch.zeros(2, 2)})
    less = {name: tensor for name, tensor in gathered.items() if "embed_tokens" not in name}
    with pytest.raises(RefusedError, match=r"1 missing: model\.embed_tokens\.weight"):
        staged(folder, ("policy",), less)


@pytest.mark.parametrize("stored", [False, True])
def test_tied_draft_model_stage_with_and_without_lm_head(stored: bool, tmp_path: Path) -> None:
    """The trainer's releases of it do not."""
    plain = {"model.embed_tokens.weight": torch.ones(16, 8), "model.norm.weight": torch.ones(8)}
    both = plain | {"lm_head.weight": torch.ones(16, 8)}
    store = StageStore(tmp_path, 1 << 20)
    first = specs_of(both if stored else plain)
    seen = Description(False, (), "float32", tied=(DRAFT,))
    draft = Weights.of(DRAFT, 0, first, store.new_folder())
    expected = _expected_draft(draft, seen, SERVED["draft_model"])
    for tensors in (plain, both):
        specs = specs_of(tensors)
        assert [spec.name for spec in expected.check(specs)] == [*plain]


@pytest.mark.parametrize("tied", [(), (DRAFT,)])
def test_first_draft_is_held_without_tied_lm_head(tied: tuple[str, ...], tmp_path: Path) -> None:
    """Without a tied lm_head: it is release 0 of a trainer that has the same checkpoint."""
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    draft = write(tmp_path / "draft", {name: torch.ones(16, 8) for name in names})

    settings = Settings(draft, draft, open_to_all(), draft_kind="draft_model")
    control, _ = asyncio.run(plane(settings, tied))
    held = names[1:] if tied else names
    assert [tensor.name for tensor in control.live[DRAFT].source.tensors] == held
    staged_ones = specs_of({name: torch.ones(16, 8) for name in held})
    assert control.state().draft_sha256 == digest_of_specs(staged_ones)


def test_first_draft_is_held_without_shared_embeddings(tmp_path: Path) -> None:
    """Loading it again would write the embeddings of its checkpoint into the policy.

    Other trainers save a copy of them, which vLLM takes for the policy's own.
    """
    tensors = {name: torch.ones(16, 8) for name in ("embed_tokens.weight", "fc.weight")}
    draft = write(tmp_path / "draft", tensors)
    settings = Settings(draft, draft, open_to_all(), draft_kind="eagle3")
    for shares, held in ((True, ["fc.weight"]), (False, [*tensors])):
        control, _ = asyncio.run(plane(settings, shares=shares))
        assert [tensor.name for tensor in control.live[DRAFT].source.tensors] == held


def test_untied_policy_stage_requires_lm_head(tmp_path: Path) -> None:
    """Whatever config.json says: vLLM serves one that the checkpoint has and that differs."""
    whole = policy_tensors(make_model(), "bfloat16")
    folder = write(tmp_path / "model", whole, tie_word_embeddings=True)
    assert staged(folder, (), whole) == (sorted(whole), True)
    del whole["lm_head.weight"]
    with pytest.raises(RefusedError, match=r"1 missing: lm_head\.weight"):
        staged(folder, (), whole)


def test_draft_stage_is_refused_without_draft_weights() -> None:
    expected = _expected_draft(
        Weights(DRAFT, 0, WeightSource()), Description(False, (), "float32"), SERVED["ngram"]
    )
    for specs in ([], [spec_of("fc.weight", torch.zeros(2))]):
        with pytest.raises(RefusedError, match="without weights"):
            expected.check(specs)


def test_shared_parameters_are_refused_if_stages_write_them() -> None:
    shared = Description(True, ("lm_head.weight",), "float32")
    refuse_shared(shared, SERVED["mtp"])
    of_glm = Description(True, ("model.layers.2.shared_head.head.weight",), "float32")
    refuse_shared(of_glm, SERVED["mtp"])
    with pytest.raises(RefusedError, match="lm_head"):
        refuse_shared(shared, SERVED["eagle3"])


class Fused(nn.Module):
    """A module that copies its projections when a checkpoint is loaded, as vLLM's DFlash does."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shared = policy
        self.layer.kv_cache = torch.zeros(2, 4)
        self.steps = torch.arange(3)

        self.table = nn.Module()
        self.table.register_buffer("cos_sin", torch.ones(3, 4), persistent=False)

    def build(self) -> None:
        self.layer._fused_kv_weight = torch.cat([self.layer.weight.data, self.layer.weight.data])
        self._norms = [self.layer.bias.data]
        self._by_layer = {0: [self.layer.weight.data.clone()]}
        self._cos_sin = self.table.cos_sin


def test_unaccounted_derived_tensors_are_refused() -> None:
    policy = nn.Linear(4, 4)
    policy._packed = torch.zeros(4)
    draft = Fused(policy)
    assert unaccounted(policy, draft) == []
    draft.build()
    found = unaccounted(policy, draft)
    assert found == ["_by_layer", "_norms", "layer._fused_kv_weight"]
    with pytest.raises(RefusedError, match="_fused_kv_weight"):
        refuse_shared(Description(True, (), "float32", tuple(found)), SERVED["mtp"])


def test_dense_qwen3_next_is_accepted() -> None:
    """The first half fails on a vLLM that takes it: then the workaround can go."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.qwen3_next import QwenNextMixtureOfExperts

    from rollout_server.vllm.patches import allow_dense_qwen3_next
    from rollout_server.vllm.served import dense_qwen3_next

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.layers = nn.ModuleList([nn.Module()])
            self.model.layers[0].mlp = nn.Linear(2, 2)

    class Theirs(Dense, QwenNextMixtureOfExperts):
        pass

    class Ours(dense_qwen3_next._DenseAllowed, Theirs):
        pass

    with pytest.raises(RuntimeError, match="No Qwen3Next layer"):
        Theirs().set_moe_parameters()
    ours = Ours()
    ours.set_moe_parameters()
    assert ours.num_moe_layers == 0
    allow_dense_qwen3_next()
    for name in ("Qwen3NextForCausalLM", "Qwen3NextMTP"):
        assert ModelRegistry.models[name].load_model_cls() is getattr(dense_qwen3_next, name)
