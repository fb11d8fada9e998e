"""DFlash drafts: their function, checkpoints, first weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from draft_trainer.checkpoints import read_policy
from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.dflash import Dflash, DflashConfig, DflashHead
from draft_trainer.drafters.initial import init_dflash
from draft_trainer.releases.registry import Registry
from slipstream.errors import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2
from tests.draft_trainer.rig import make_config, running, train_until_released
from tests.draft_trainer.synthetic import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    Policy,
    collate,
    dflash_document,
    dflash_head,
    draft_vocab_ids,
    speculators_document,
)

STEPS = 3
NESTED = dflash_document()["dflash_config"]
assert isinstance(NESTED, dict)


def moved(head: DflashHead, seed: int = 0) -> DflashHead:
    """Every parameter matters: norms are not ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head


class Reference(nn.Module):
    """The same draft of transformers' own modules, run as a server runs it: block after block."""

    def __init__(self, head: DflashHead) -> None:
        super().__init__()
        names = {n: v for n, v in head.config.document.items() if n not in ("architectures",)}
        config = Qwen3Config(**{n: v for n, v in names.items() if n != "model_type"})
        config._attn_implementation = "eager"
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(HIDDEN), Qwen3RMSNorm(HIDDEN)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(2))
        self.rotary = Qwen3RotaryEmbedding(config)
        self.mask = head.config.mask_token_id
        self.causal, self.masks = head.config.causal, 1 - head.config.sample_from_anchor
        own = self.state_dict()
        self.load_state_dict({n: t for n, t in head.state_dict().items() if n in own})

    def block(self, batch: Batch, row: int, anchor: int, steps: int) -> Tensor:
        """[steps, H]: the outputs at the places that propose."""
        context = self.hidden_norm(self.fc(batch.aux[row, : anchor + 1]))
        mask = batch.policy.embed_tokens[self.mask]
        masks = [mask] * (steps - 1 + self.masks)
        hidden = torch.stack([batch.embeds[row, anchor + 1], *masks])
        count = len(context) + len(hidden)
        cos, sin = self.rotary(hidden, torch.arange(count)[None])
        for layer in self.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            both = torch.cat([context, normed])

            def heads(x: Tensor) -> Tensor:
                return x.unflatten(-1, (-1, 8)).transpose(0, 1)[None]

            q = attention.q_norm(heads(attention.q_proj(normed)))
            k = attention.k_norm(heads(attention.k_proj(both)))
            v = heads(attention.v_proj(both))
            nothing = torch.zeros(1, q.shape[1], len(context), 8)
            q, k = apply_rotary_pos_emb(torch.cat([nothing, q], 2), k, cos, sin)
            q = q[:, :, len(context) :]
            scores = q @ repeat_kv(k, 2).transpose(2, 3) * 8**-0.5
            if self.causal:
                later = torch.ones(len(hidden), count).triu(len(context) + 1).bool()
                scores = scores.masked_fill(later, -torch.inf)
            weights = scores.softmax(-1)
            attended = (weights @ repeat_kv(v, 2))[0].transpose(0, 1).flatten(1)
            hidden = hidden + attention.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)[-steps:]


@pytest.mark.parametrize("causal", [False, True, 1])
@pytest.mark.parametrize("first_anchor", [0, 5])
def test_dflash_outputs_match_reference_blocks(first_anchor: int, causal: bool) -> None:
    document = dflash_document(dflash_config=NESTED | {"causal": causal})
    head = moved(DflashHead(DflashConfig.from_dict(document)))
    assert head.config.causal == causal
    reference = Reference(head)
    policy = Policy()
    batch = collate(policy.samples(3), policy.heads(rows=torch.arange(VOCAB)))
    with torch.no_grad():
        outputs = [head.normed(output) for output in head.unroll(batch, STEPS, first_anchor)]
    assert [tuple(x.shape) for x in outputs] == [
        (3, batch.token_ids.shape[1] - first_anchor, HIDDEN)
    ] * STEPS
    for row, length in enumerate((batch.teacher_known.sum(1) + 1).tolist()):
        for anchor in range(first_anchor, length - 1):
            with torch.no_grad():
                expected = reference.block(batch, row, anchor, STEPS)
            found = torch.stack([output[row, anchor - first_anchor] for output in outputs])
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def write(folder: Path, head: DflashHead, **others: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.config.to_dict()))
    tensors = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    save_file(tensors | others, folder / "model.safetensors")
    return folder


def policy_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 8} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_dflash_release_has_only_its_own_tensors(tmp_path: Path) -> None:
    head = moved(dflash_head())
    copies = {name: torch.ones(VOCAB, HIDDEN) for name in ("embed_tokens.weight", "lm_head.weight")}
    theirs = write(tmp_path / "theirs", head, **copies)
    registry = Registry(tmp_path / "releases", DRAFTERS["dflash"])
    policy = policy_folder(tmp_path / "policy")
    assert registry.import_initial(theirs, policy).draft_kind == "dflash"
    moved(head, seed=1)
    registry.create(head, release_pb2.ReleaseManifest(), torch.float32)
    for version in (0, 1):
        folder = registry.path(version)
        assert load_file(folder / "model.safetensors").keys() == head.state_dict().keys()
        assert json.loads((folder / "config.json").read_text()) == head.config.document
    again = Registry(tmp_path / "releases").drafter.read(registry.path(1), policy)
    assert again.as_stored and again.config.aux_layer_ids == (2, 4, 5)
    for name, parameter in again.draft().named_parameters():
        assert torch.equal(parameter, head.get_parameter(name))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "architectures"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"draft_vocab_size": 8}, "missing .*lm_head.weight"),
        ({"draft_vocab_size": 25}, "draft_vocab_size: found 25, expected at most 24"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type: found eagle3, expected df"),
        ({"dflash_config": None}, "dflash_config"),
        ({"dflash_config": NESTED | {"mask_token_id": VOCAB}}, "mask_token_id: found 24"),
        ({"dflash_config": NESTED | {"target_layer_ids": [1, 7, 8]}}, "layers from 0 to 7"),
        ({"dflash_config": NESTED | {"use_swa": True}}, "dflash_config.use_swa"),
        ({"dflash_config": NESTED | {"sample_from_anchor": True}}, "sample_from_anchor: found Tru"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers: found 1048576, expected .* to 1024"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: found 3, expected a divisor of 4"),
    ],
)
def test_dflash_unsupported_config_is_refused(
    changes: dict[str, object], field: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "draft", dflash_head())
    (folder / "config.json").write_text(json.dumps(dflash_document(**changes)))
    with pytest.raises(RefusedError, match=field):
        Dflash().read(folder, policy_folder(tmp_path / "policy"))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("size", [DRAFT_VOCAB, VOCAB])
def test_speculators_block_draft_is_released_as_read(kind: str, size: int, tmp_path: Path) -> None:
    """Names, shapes and fields of a release are those of the file, without the policy's copies."""
    document = speculators_document(kind, draft_vocab_size=size)
    drafter, ids = DRAFTERS[kind], draft_vocab_ids()
    torch.manual_seed(0)
    head = drafter.build(document)
    assert head.config.aux_layer_ids == (2, 4, 5) and head.config.draft_vocab_size == size
    tensors = {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}
    if size < VOCAB:
        tensors |= {"d2t": ids - torch.arange(size), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    else:
        tensors["lm_head.weight"] = torch.ones(VOCAB, HIDDEN)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_file(head.state_dict() | tensors, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(document))
    policy = policy_folder(tmp_path / "policy")
    registry = Registry(tmp_path / "releases", drafter)
    assert registry.import_initial(theirs, policy).draft_kind == kind
    read = drafter.read(theirs, policy)
    assert not read.as_stored and read.assumed == ()
    draft = read.draft()
    assert draft.target_ids().tolist() == (ids.tolist() if size < VOCAB else [*range(VOCAB)])
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(1.0)
    registry.create(draft, release_pb2.ReleaseManifest(), torch.float32)
    kept = {"d2t", "t2d"} if size < VOCAB else set()
    for version in (0, 1):
        stored = load_file(registry.path(version) / "model.safetensors")
        assert json.loads((registry.path(version) / "config.json").read_text()) == document
        assert stored.keys() == head.state_dict().keys() | kept
        for name, tensor in stored.items():
            given = tensors.get(name, head.state_dict().get(name))
            assert given is not None and tensor.shape == given.shape
            assert torch.equal(tensor, given + (0 if name in kept else version))
    assert drafter.read(registry.path(1), policy).as_stored
    (theirs / "config.json").write_text(json.dumps(document | {"draft_vocab_size": 15}))
    with pytest.raises(RefusedError, match=r"lm_head.weight|markov_w2"):
        drafter.read(theirs, policy)


def test_dflash_activation_that_is_assumed_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", dflash_head())
    assert Dflash().read(folder).assumed == ()
    (folder / "config.json").write_text(json.dumps(dflash_document(hidden_act=None)))
    assert Dflash().read(folder).assumed == ('hidden_act = "silu"',)


def test_dflash_of_another_policy_or_pickle_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", dflash_head())
    for changes, field in (
        ({"vocab_size": 99}, "vocab_size: found 24, expected 99"),
        ({"hidden_size": 99}, "hidden_size: found 16, expected 99"),
    ):
        with pytest.raises(RefusedError, match=field):
            Dflash().read(folder, policy_folder(tmp_path / "policy", **changes))
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(RefusedError, match="a pickle"):
        Dflash().read(folder)


def test_dflash_init_writes_what_vllm_loads(
    policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = read_policy(policy_dir)
    draft = init_dflash(policy, 127, layers=3, aux_layer_ids=(2, 5, 7), intermediate_size=64)
    assert draft.config == DflashConfig.from_dict(draft.config.to_dict())
    assert draft.config.num_hidden_layers == len(draft.layers) == 3
    nested = draft.config.document["dflash_config"]
    # Outputs of layers from 0 there, numbers of layers passed here.
    assert nested == {"mask_token_id": 127, "target_layer_ids": [1, 4, 6]}
    assert torch.equal(draft.norm.weight, policy.final_norm.float())
    out = tmp_path / "draft"
    options = ("--policy", str(policy_dir), "--out", str(out), "--layers", "3")
    made = ("init", "--draft-kind", "dflash", *options, "--aux-layers", "2,5,7")
    for more, text in (
        ((), "--mask-token"),
        (("--mask-token", "127", "--layers", "0"), "--layers"),
    ):
        assert draft_trainer([*made, *more]) == 2
        assert text in capsys.readouterr().err and not out.exists()
    assert draft_trainer([*made, "--intermediate-size", "64", "--mask-token", "127"]) == 0
    written = Dflash().read(out, policy_dir)
    assert written.as_stored and written.config == draft.config
    for name, tensor in written.tensors.items():
        assert torch.equal(tensor, draft.get_parameter(name).bfloat16())
    with pytest.raises(RefusedError, match="mask_token_id: found 128, expected a token"):
        init_dflash(policy, 128)
    for layers in ((7, 2), (2, 11), (0, 2)):
        with pytest.raises(RefusedError, match="--aux-layers"):
            init_dflash(policy, 127, aux_layer_ids=layers)


def test_dflash_trainer_releases_a_better_draft(tmp_path: Path) -> None:
    """Over the wire, its layers asked for, the whole vocabulary announced, judged by the gate."""
    write(tmp_path / "initial", dflash_head())
    policy = Policy()
    tensors = {"lm_head.weight": policy.lm_head, "embed_tokens.weight": policy.embed}
    with running(make_config(tmp_path, draft={"kind": "dflash"})) as (_, client):
        opened = client.open()
        assert [*opened.aux_layers] == [2, 4, 5]
        client.announce(1, policy, tensors)
        version = train_until_released(client)
        releases = client.stub.ListReleases(pb.ListReleasesRequest(), timeout=10).releases
    newest = releases[-1]
    assert (newest.draft_version, newest.draft_kind) == (version, "dflash")
    assert newest.gate.candidate_acceptance_length > newest.gate.incumbent_acceptance_length
