"""``draft-trainer init``: an untrained draft for a policy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

from draft_trainer.checkpoints import PolicyCheckpoint, read_embeddings, read_policy
from draft_trainer.cli.main import main
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.initial import choose_draft_vocabulary, init_dflash, init_draft
from draft_trainer.drafters.rope import Rope
from draft_trainer.warmup import vocabulary
from draft_trainer.warmup.rollouts import Rollout
from draft_trainer.warmup.vocabulary import count_tokens, coverage, smallest_size, tokens_to_count
from slipstream.errors import RefusedError
from tests.draft_trainer.synthetic import VOCAB, draft_vocab_ids
from tests.draft_trainer.warmup_rig import write_rollouts

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 10,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
}


def policy(**changes: Any) -> PolicyCheckpoint:
    generator = torch.Generator().manual_seed(0)
    return PolicyCheckpoint(
        SIZES | changes,
        torch.randn(VOCAB, 16, generator=generator),
        torch.rand(16, generator=generator),
    )


def init(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and the last line of stderr."""
    code = main(["init", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, (err.splitlines() or [""])[-1]


def test_init_takes_lm_head_rows_and_norm_of_policy() -> None:
    given = policy()
    made = init_draft(given, draft_vocab_ids())
    assert torch.equal(made.lm_head.weight, given.lm_head[draft_vocab_ids()])
    assert torch.equal(made.norm.weight, given.final_norm)
    assert made.config.aux_layer_ids == (2, 5, 7) and made.config.rope.theta == 123.0
    assert torch.equal(made.fc.weight, init_draft(given, draft_vocab_ids()).fc.weight)
    assert not torch.equal(made.fc.weight, init_draft(given, draft_vocab_ids(), seed=1).fc.weight)
    # fc is near the mean of the auxiliary states, so that it starts at their scale.
    aux = torch.randn(100, 48, generator=torch.Generator().manual_seed(1))
    mean = aux.view(100, 3, 16).mean(1)
    assert float((aux @ made.fc.weight.detach().T - mean).norm() / mean.norm()) < 0.25


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text", "gemma3_text"])
def test_init_shifts_zero_centred_final_norm(kind: str) -> None:
    given = policy(model_type=kind)
    for made in (init_draft(given, None), init_dflash(given, 1)):
        assert torch.equal(made.norm.weight, 1 + given.final_norm)


def test_init_drops_mrope_sections() -> None:
    """Qwen3.5's config.json has them, and Qwen2.5-VL's."""
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    default = {"rope_type": "default", "rope_theta": 123.0, "partial_rotary_factor": 0.5}
    older = {"rope_parameters": None, "rope_theta": 123.0, "partial_rotary_factor": 0.5}
    for given in (
        policy(rope_parameters=default | sections),
        policy(**older, rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}),
    ):
        eagle3 = init_draft(given, None, aux_layer_ids=(2, 5, 7)).config
        dflash = init_dflash(given, 1).config
        assert eagle3.to_dict()["rope_parameters"] == default
        assert dflash.to_dict()["rope_parameters"] == default


_FACTORS = {"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_UNREAD = {"attn_factor": 0.9, "finetuned": True, "extrapolation_factor": 1.0}
_HUNYUAN = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
_LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
_SLIDING = {"rope_type": "default", "rope_theta": 77.0}


@pytest.mark.parametrize(
    ("changes", "rope", "told"),
    [
        # Phi-4-mini, as transformers 5 saves it and as on the hub; MiniCPM4 without a base.
        (
            {"rope_parameters": {**_FACTORS, "rope_theta": 500.0}},
            Rope(500.0),
            "plain .* base 500.0",
        ),
        ({"rope_parameters": _FACTORS}, Rope(), "plain rope with base 10000.0"),
        # Ministral 3.
        (
            {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1, "rope_theta": 9e5}},
            Rope(9e5),
            "plain rope with base 900000.0",
        ),
        # Gemma 3 and Gemma 4, whose kinds of layers have ropes of their own.
        (
            {"rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _SLIDING}},
            Rope(5e5, "linear", (("factor", 8.0),)),
            "rope of the full-attention layers",
        ),
        # DeepSeek-R1-0528-Qwen3-8B and YaRN's own models: nobody reads these.
        (
            {"rope_parameters": {**_YARN, **_UNREAD, "rope_theta": 1e6}},
            Rope(1e6, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 32))),
            "$",
        ),
        # HunYuan: the dynamic kind reads none of YaRN's.
        (
            {"rope_parameters": {**_HUNYUAN, "rope_theta": 1e4}},
            Rope(1e4, "dynamic", (("alpha", 1000.0), ("factor", 1.0))),
            "$",
        ),
        # Nemotron-H's attention has no positions.
        ({"rope_parameters": None}, Rope(), "plain rope with base 10000.0, as the policy names"),
    ],
)
def test_init_replaces_unsupported_rope(changes: dict[str, Any], rope: Rope, told: str) -> None:
    given = policy(**changes)
    assert init_draft(given, None).config.rope == rope
    assert init_dflash(given, 1).config.block.rope == rope
    assert re.match(told, Rope.of_draft(given.config)[1])


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "longrop", "rope_theta": 500.0}, "rope_type"),
        ({**_YARN, "rope_theta": 500.0, "beta_fats": 16}, "beta_fats"),
        ({"full_attention": {**_LINEAR, "factr": 2.0}, "sliding_attention": _SLIDING}, "factr"),
    ],
)
def test_init_invalid_rope_is_refused(rope: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedError, match=field):
        init_draft(policy(rope_parameters=rope), None)


@pytest.mark.parametrize(
    ("changes", "layers", "text"),
    [
        ({"intermediate_size": None}, None, "--intermediate-size: found nothing"),
        ({"rms_norm_eps": None}, None, "config.json rms_norm_eps"),
        ({"rope_parameters": [1]}, None, r"config\.json rope_parameters: found \[1\], expected an"),
        ({"num_key_value_heads": [2, 1]}, None, r"the policy's .* num_key_value_heads: found \[2"),
        ({"num_attention_heads": [2]}, None, "the policy's config.json num_attention_heads"),
        ({"intermediate_size": [9, 9]}, None, "the policy's config.json intermediate_size"),
        ({"head_dim": "8"}, None, "the policy's config.json head_dim: found 8"),
        ({"num_attention_heads": 3}, None, "num_attention_heads: found 3, .* --norms qk_norm"),
        ({}, (2, 11), r"--aux-layers: found \[2, 11\], expected ascending layers from 0 to 10"),
        ({}, (5, 2), "leave the option out, which chooses 2,5,7"),
    ],
)
def test_init_incomplete_policy_config_is_refused(
    changes: dict[str, Any], layers: tuple[int, ...] | None, text: str
) -> None:
    with pytest.raises(RefusedError, match=text):
        init_draft(policy(**changes), None, aux_layer_ids=layers)


def test_read_policy_refuses_a_draft(tmp_path: Path, draft_dir: Path) -> None:
    for folder in (draft_dir, draft_dir.parent / "dflash"):
        with pytest.raises(RefusedError, match=r"so a draft, expected the policy itself"):
            read_policy(folder)


def test_init_for_a_policy_with_an_odd_number_of_heads() -> None:
    config = init_draft(policy(num_attention_heads=3), None, norms=("qk_norm",)).config
    assert (config.num_attention_heads, config.head_dim) == (3, 8)


def test_init_for_nemotron_h(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint has other names, and no count of layers where transformers has saved it."""
    sizes = {name: value for name, value in SIZES.items() if name != "rope_parameters"}
    sizes["num_key_value_heads"] = 1
    hybrid = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8}
    kinds = ["linear_attention", "full_attention", "mlp"] * 4
    config = NemotronHConfig(**sizes, **hybrid, layers_block_type=kinds, chunk_size=8)
    model = NemotronHForCausalLM(config)
    model.save_pretrained(tmp_path / "policy")
    stored = load_file(tmp_path / "policy" / "model.safetensors")
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight"} < stored.keys()
    options = ("--policy", tmp_path / "policy", "--out", tmp_path / "draft")
    code, out, err = init(capsys, *options)
    assert code == 0, err
    assert "after layers 2, 6, 9" in out and "as the policy names none" in out
    head = Eagle3().read(tmp_path / "draft", tmp_path / "policy").draft()
    assert torch.equal(head.lm_head.weight, model.lm_head.weight.bfloat16().float())
    assert torch.equal(read_embeddings(tmp_path / "policy"), model.model.embeddings.weight)


def test_draft_vocabulary_takes_most_frequent_tokens() -> None:
    counts = torch.tensor([3, 0, 5, 3, 3, 9, 0, 0])
    assert choose_draft_vocabulary(counts, 3).tolist() == [0, 2, 5]
    assert choose_draft_vocabulary(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]
    for size in (0, 9):
        with pytest.raises(RefusedError, match="--draft-vocab"):
            choose_draft_vocabulary(counts, size)


def _rollouts(prompts: int, tokens: int, vocab: int) -> list[Rollout]:
    """One completion of each prompt; token t is drawn as often as 1 / (t + 1) says."""
    weights = 1.0 / torch.arange(1, vocab + 1)
    drawn = weights.multinomial(prompts * tokens, True, generator=torch.Generator().manual_seed(0))
    rows = drawn.view(prompts, tokens).tolist()
    return [Rollout(number, [number], row) for number, row in enumerate(rows)]


def test_draft_vocabulary_covers_prompts_that_did_not_choose_it() -> None:
    rollouts, fresh = _rollouts(600, 200, 2000), torch.zeros(9000, dtype=torch.int64)
    counts = count_tokens(rollouts, 9000)
    assert counts.sum() == 120_000 and all(20_000 < int(fold.sum()) < 40_000 for fold in counts)
    size = smallest_size(counts)
    assert size == 2048 and coverage(counts)[size - 1] > 0.999 > coverage(counts)[1023]
    # Unlike in their own tokens, of which 1,024 would seem to cover more.
    fresh[:2000] = 1_000_000 / torch.arange(1, 2001)
    ids = choose_draft_vocabulary(counts.sum(0), 1024)
    own, real = (float(c[ids].sum() / c.sum()) for c in (counts.sum(0), fresh))
    estimate = float(coverage(counts)[1023])
    assert own > real > estimate == pytest.approx(real, abs=4e-3)


def test_draft_vocabulary_of_few_or_unlike_tokens_is_largest() -> None:
    vocab = 40_000
    # Too few to tell 99.9 % from less, although none is missing.
    few = count_tokens([Rollout(n, [n], [7] * 29) for n in range(100)], vocab)
    assert float(coverage(few)[1023]) == 1.0 and smallest_size(few) == 32_000
    enough = count_tokens([Rollout(n, [n], [7] * 31) for n in range(100)], vocab)
    assert smallest_size(enough) == 1024
    # Each prompt has a tenth of tokens of its own.
    own = [Rollout(n, [n], [7] * 90 + [vocab - 1 - n] * 10) for n in range(100)]
    counts = count_tokens(own, vocab)
    assert smallest_size(counts) == 32_000
    assert float(coverage(counts)[31_999]) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("goal", "counted"),
    [(None, 524_288), (9_000, 9_000), (10**6, 65_536), (4 * 10**6, 250_000), (10**9, 524_288)],
)
def test_warmup_counts_a_sixteenth_of_its_goal(goal: int | None, counted: int) -> None:
    assert tokens_to_count(goal) == counted


def test_init_chooses_the_vocabulary_of_rollouts(
    tmp_path: Path,
    policy_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vocabulary, "MULTIPLE", 32)
    rollouts = [([5, 9, n % 100], [n % 60] * 40) for n in range(200)]
    file = write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    options = ("--policy", policy_dir, "--rollouts", file, "--out", tmp_path / "draft")
    code, out, _ = init(capsys, *options)
    assert code == 0 and "draft vocabulary 64 of 128 tokens" in out
    assert "Of 8,000 completion tokens" in out
    head = Eagle3().read(tmp_path / "draft").draft()
    assert set(range(60)) < set(head.target_ids().tolist()) and head.config.draft_vocab_size == 64
    parameters = sum(p.numel() for p in head.parameters())
    share = parameters / (parameters + 64 * head.config.hidden_size)
    assert f"{parameters:,} parameters" in out
    assert f"64 tokens cover 100.00% at {share:.2f}; 32 tokens cover " in out


def test_init_writes_the_norms_that_are_asked_for(
    tmp_path: Path, policy_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    norms = ("norm_output", "fc_norm", "qk_norm")
    options = ("--policy", policy_dir, "--norms", *norms, "--out", tmp_path / "draft")
    assert init(capsys, *options)[0] == 0
    head = Eagle3().read(tmp_path / "draft").draft()
    assert isinstance(head, Eagle3Head) and all(getattr(head.config, name) for name in norms)
    added = {"midlayer.self_attn.q_norm", "midlayer.self_attn.k_norm"}
    added |= {f"fc_norm.{number}" for number in range(3)}
    for name in added:
        assert bool((head.get_parameter(f"{name}.weight") == 1.0).all())
    with pytest.raises(SystemExit):
        main(["init", "--norms", "norm_input"])


def test_read_policy_of_hugging_face_layouts(tmp_path: Path, policy_dir: Path) -> None:
    whole = read_policy(policy_dir)
    tensors = load_file(policy_dir / "model.safetensors")
    assert torch.equal(whole.lm_head, tensors["lm_head.weight"])
    assert torch.equal(whole.final_norm, tensors["model.norm.weight"])
    config = json.loads((policy_dir / "config.json").read_text())

    # In two files, of a model that wraps the language model, with tied embeddings.
    tied = {"text_config": config | {"tie_word_embeddings": True}}
    del tensors["lm_head.weight"]
    names = sorted(tensors)
    for part, chosen in enumerate((names[:40], names[40:])):
        nested = {n.replace("model.", "model.language_model.", 1): tensors[n] for n in chosen}
        save_file(nested, tmp_path / f"model-0000{part}.safetensors")
    config["tie_word_embeddings"] = False
    unsaid = {name: value for name, value in config.items() if name != "tie_word_embeddings"}
    # transformers 4, transformers 5, and either where it is the class's default.
    beside = {"tie_word_embeddings": True, "text_config": unsaid}
    for document in (tied, beside, {"text_config": unsaid}, unsaid):
        (tmp_path / "config.json").write_text(json.dumps(document))
        read = read_policy(tmp_path)
        assert torch.equal(read.lm_head, tensors["model.embed_tokens.weight"])
        assert torch.equal(read.final_norm, whole.final_norm)

    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match=r"no lm_head\.weight"):
        read_policy(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tied["text_config"] | {"vocab_size": 64}))
    with pytest.raises(RefusedError, match=r"embed_tokens\.weight: found .*\[128, 192\]"):
        read_policy(tmp_path)
    (tmp_path / "model-00000.safetensors").write_bytes(b"none")
    with pytest.raises(RefusedError, match="model-00000"):
        read_policy(tmp_path)


_FP8 = torch.ones(VOCAB, 192).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"lm_head.weight": _FP8}, "lm_head.weight is float8_e4m3fn"),
        ({"lm_head.weight_scale": torch.ones(VOCAB, 1)}, "lm_head.weight_scale is a part"),
        ({"lm_head.weight": _FP8.view(torch.uint8)[:, :96]}, "lm_head.weight is uint8"),
        (
            # As GPTQ and compressed-tensors name it: lm_head has no weight, and is not tied.
            {"lm_head.weight": None, "lm_head.qweight": torch.zeros(24, VOCAB, dtype=torch.int32)},
            "lm_head.qweight is a part",
        ),
        (
            {"lm_head.weight": None, "lm_head.weight_packed": torch.zeros(VOCAB, 24).int()},
            "lm_head.weight_packed is a part",
        ),
        ({"lm_head.weight.absmax": torch.ones(9)}, "lm_head.weight.absmax is a part"),
        ({"model.norm.weight": _FP8[0]}, "model.norm.weight is float8_e4m3fn"),
    ],
)
def test_quantized_weights_of_a_policy_are_refused_by_name(
    tmp_path: Path, policy_dir: Path, changes: dict[str, torch.Tensor | None], found: str
) -> None:
    """Taken as plain numbers, rows would be up to 53,000 times too long, or the embeddings'."""
    tensors = load_file(policy_dir / "model.safetensors") | changes
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads((policy_dir / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match=re.escape(found)) as refused:
        read_policy(tmp_path)
    assert "from before it was quantized" in refused.value.next_step


def test_quantized_embeddings_of_a_policy_are_refused(tmp_path: Path, policy_dir: Path) -> None:
    scale = {"model.embed_tokens.weight_scale_inv": torch.ones(1, 2)}
    tensors = load_file(policy_dir / "model.safetensors") | scale
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((policy_dir / "config.json").read_text())
    with pytest.raises(RefusedError, match=r"weight_scale_inv is a part"):
        read_embeddings(tmp_path)


def test_init_writes_a_draft_of_every_token(
    tmp_path: Path, policy_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = init(capsys, "--policy", policy_dir, "--out", tmp_path / "draft")
    assert code == 0 and "draft vocabulary: all 128 tokens" in out
    head = Eagle3().read(tmp_path / "draft").draft()
    assert head.target_ids().tolist() == list(range(128))
    assert head.config.aux_layer_ids == (2, 5, 7)
    rows = read_policy(policy_dir).lm_head
    assert torch.equal(head.lm_head.weight.bfloat16(), rows.bfloat16())
    # The same again, to the byte.
    assert init(capsys, "--policy", policy_dir, "--out", tmp_path / "again")[0] == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "draft" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_init_refusals_leave_no_files(
    tmp_path: Path, policy_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    given: dict[str, object] = {"--policy": policy_dir, "--out": tmp_path / "draft"}
    for changes, text in (
        ({"--out": there}, f"--out {there}: found something there"),
        ({"--aux-layers": "2,x"}, "--aux-layers: found '2,x'"),
        ({"--aux-layers": "2,99"}, "--aux-layers: found [2, 99]"),
        ({"--draft-kind": "dflash"}, "--mask-token: found nothing"),
        ({"--draft-kind": "dspark", "--norms": "qk_norm"}, "--norms: found ('qk_norm',)"),
        ({"--markov-rank": "8"}, "found 8, expected nothing with --draft-kind eagle3"),
        ({"--draft-kind": "mtp", "--aux-layers": "2,5"}, "--aux-layers: found 2,5"),
    ):
        code, printed, line = init(capsys, *(x for pair in (given | changes).items() for x in pair))
        assert code == 2 and not printed
        assert text in line and "Next step: " in line, line
        assert [p.name for p in tmp_path.iterdir()] == ["there"]
        assert not list(there.iterdir())


def test_long_reading_of_rollouts_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "TELL_SECONDS", 0.0)
    told: list[str] = []
    rollouts = [Rollout(0, [1], [2] * 3), Rollout(1, [1], [2] * 4)]
    assert [*vocabulary._with_progress(rollouts, 1000, told.append)] == rollouts
    expected = [f"read {tokens} of 1,000 completion tokens" for tokens in (3, 7)]
    assert told == expected
