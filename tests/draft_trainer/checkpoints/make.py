"""Made these checkpoints: each trainer writes a tiny draft of its own, and what it computes on it.

Not a part of the tests. Run once per trainer, in an environment that has it (speculators 0.9.0,
specforge 0.2.0, nvidia-modelopt 0.47.0): ``python make.py TRAINER FOLDER``, "policy" being first.
Beside each, ``NAME.safetensors`` holds one sequence and the first step's logits on it, in float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HIDDEN, VOCAB, DRAFT_VOCAB, TOKENS = 16, 24, 16, 6
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}


def randomise(module: nn.Module) -> None:
    """Every trained parameter, the norms too; not what is copied from the policy."""
    for name, parameter in module.named_parameters():
        if "embed" not in name and "verifier" not in name:
            nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)


def vocabulary() -> tuple[Tensor, Tensor]:
    """t2d and d2t of sixteen ids."""
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return t2d, ids - torch.arange(DRAFT_VOCAB)


def save_expected(
    folder: Path, layers: int, logits: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    """``logits(aux, embeds, positions)``, all with a batch of one."""
    aux, embeds = torch.randn(1, TOKENS, layers * HIDDEN), torch.randn(1, TOKENS, HIDDEN)
    positions = torch.arange(5, 5 + TOKENS)[None]
    with torch.no_grad():
        out = {"logits": logits(aux, embeds, positions)[:, :TOKENS]}
    out |= {"aux": aux, "embeds": embeds, "positions": positions}
    save_file({k: v[0].contiguous() for k, v in out.items()}, folder.with_suffix(".safetensors"))


def policy(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**SIZES, "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 10}
    config = Qwen3Config(**sizes, max_position_embeddings=64, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(folder / "policy")


def speculators(folder: Path) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    source = str(folder / "policy")

    def make(name: str, arch: str, windowed: bool, layers: list[int], **flags: bool) -> None:
        nested = create_transformer_layer_config(source, 1, arch, None, 32, [0][windowed:])
        t2d, d2t = vocabulary()
        model = Eagle3DraftModel.from_training_args(
            nested,
            t2d=t2d,
            d2t=d2t,
            draft_vocab_size=DRAFT_VOCAB,
            verifier_name_or_path=source,
            target_layer_ids=layers,
            ttt_steps=3,
            draft_attn_impl="eager",
            **flags,
        )
        randomise(model)
        model.config.speculators_config.verifier.name_or_path = "policy"
        model.save_pretrained(folder / name)
        (folder / name / "config.py").unlink()

        def logits(aux: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
            model.embed_tokens = nn.Embedding.from_pretrained(embeds[0])
            seen: list[Tensor] = []
            model.lm_head.register_forward_hook(lambda *given: seen.append(given[2]))
            ids = torch.arange(TOKENS)[None]
            one = torch.zeros_like(ids)
            model(aux, ids, one, position_ids=positions, ttt_steps=1)
            return seen[0]

        save_expected(folder / name, len(layers), logits)

    # The defaults of its command line, then its other architecture.
    default = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    make("speculators", "llama", True, [2, 5, 7], **default)
    make("speculators_qwen3", "qwen3", False, [2, 5], norm_before_residual=False, fc_norm=True)


def specforge(folder: Path) -> None:
    from specforge.export.to_hf import export_to_hf
    from specforge.export.to_sglang import export_to_sglang
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    def make(name: str, draft_vocab: int, more: dict[str, object]) -> None:
        given = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{**SIZES, "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 1},
            **{"draft_vocab_size": draft_vocab, "max_position_embeddings": 64},
            **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "pad_token_id": 0, **more},
        }
        config = folder / f"{name}.json"
        config.write_text(json.dumps(given))
        model = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(config)))
        randomise(model)
        if draft_vocab < VOCAB:
            model.t2d, model.d2t = vocabulary()
        state = {k: v.bfloat16() for k, v in model.state_dict().items() if "embed" not in k}
        state |= {k: v for k, v in model.state_dict().items() if k in ("t2d", "d2t")}
        run = folder / f"{name}-step1"
        run.mkdir()
        torch.save({"draft_state_dict": state, "strategy": "eagle3"}, run / "training_state.pt")
        paths = (str(run), str(config), str(folder / name))
        if draft_vocab == VOCAB:
            export_to_hf(*paths, embedding_source=str(folder / "policy"))
        else:
            export_to_sglang(*paths)
        model.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)

        def logits(aux: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
            return model.lm_head(model(aux, embeds, ttt_length=1))

        save_expected(folder / name, 3, logits)

    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    make("specforge_sglang", DRAFT_VOCAB, {"rope_theta": 1e4, "rope_scaling": llama3})
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}
    make("specforge_hf", VOCAB, {"rope_theta": 1e4, "fc_norm": True, "eagle_config": layers})


def modelopt(folder: Path) -> None:
    import modelopt.torch.speculative as mtsp
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": []}
    shape = {**SIZES, **layers, "use_last_layernorm": True, "draft_vocab_size": DRAFT_VOCAB}
    shape["rms_norm_eps"] = 1e-7
    config = {"eagle_decoder_type": "llama", "eagle_architecture_config": shape}
    mtsp.convert(model, [("eagle", {**config, "eagle_export_rope_scaling": {}})])
    module = model.eagle_module
    randomise(module)
    # The trainer puts hidden states through it as well, before hidden_norm; vLLM does not. At 1
    # both compute the same.
    nn.init.ones_(module.layers[0].input_layernorm.weight)
    module.d2t.copy_(vocabulary()[1])
    model.get_exporter().export(folder / "modelopt")

    def logits(aux: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
        module._maybe_init_rope()
        mask = torch.full((1, 1, TOKENS, TOKENS), float("-inf")).triu(1)
        return module.lm_head(module(module.fc(aux), embeds, mask, position_ids=positions)[0])

    save_expected(folder / "modelopt", 3, logits)


if __name__ == "__main__":
    torch.manual_seed(0)
    out = Path(sys.argv[2])
    {f.__name__: f for f in (policy, speculators, specforge, modelopt)}[sys.argv[1]](out)
    if sys.argv[1] == "modelopt":
        # Last of all: only what a draft's reader looks at stays of the policy.
        weights = load_file(out / "policy" / "model.safetensors")
        name = "model.embed_tokens.weight"
        save_file({name: weights[name]}, out / "policy" / "model.safetensors")
