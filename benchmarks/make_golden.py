"""A golden training case made by ModelOpt 0.47.0, for tests/draft_trainer/test_golden_modelopt.py.

Run it with the interpreter of the peer's environment, from the repository's root::

    PEERS/modelopt/bin/python -m benchmarks.make_golden INPUTS OUT

INPUTS is a golden file of another trainer: its inputs (``in.*``) and weights (``w.*``) are taken
over, so that all golden files are of one case. OUT gets them, what ModelOpt was fed
(``peer_in.*``), its logits, losses and accuracies per TTT step, the loss and the gradients.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.draft_training.case import Case, CaseTensors
from benchmarks.draft_training.peer_modelopt import ModelOpt

STEPS = 4
# As the other golden files have it: the last matrix of the MLP's three is left out for size.
WITHOUT_GRADIENT = "midlayer.mlp.up_proj.weight"


def make(inputs: dict[str, Tensor], dims: dict[str, int]) -> dict[str, Tensor]:
    """One forward and backward pass of ModelOpt on the case."""
    rows, length = inputs["in.input_ids"].shape
    case = Case(
        *("golden", dims["H"], dims["I"], dims["nh"], dims["nkv"], dims["hd"], dims["V"]),
        draft_vocab_size=dims["Vd"],
        rows=rows,
        tokens=length,
        ttt_steps=STEPS,
    )
    weights = {name[2:]: value for name, value in inputs.items() if name.startswith("w.")}
    embed_tokens = weights.pop("embed_tokens.weight")
    lm_head = weights.pop("target.lm_head.weight")
    order = torch.arange(case.draft_vocab_size)
    head = {
        name: value
        for name, value in weights.items()
        if name not in ("d2t", "t2d", "target.norm.weight")
    }
    tensors = CaseTensors(
        token_ids=inputs["in.input_ids"],
        aux=inputs["in.aux"],
        final_hidden=inputs["in.last_postnorm"],
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        draft_vocab_ids=weights["d2t"] + order,
        weights=head,
    )
    peer = ModelOpt(case, tensors, "sdpa plain batched")
    fed: dict[str, Any] = {
        "input_ids": inputs["in.input_ids"],
        "attention_mask": torch.ones_like(inputs["in.input_ids"]),
        "loss_mask": inputs["in.loss_mask"],
    }
    steps = _record_steps(peer.model)
    loss = peer.model(**fed, base_model_outputs=peer.batches[0]["base_model_outputs"]).loss
    loss.backward()
    golden = {name: value for name, value in inputs.items() if name.startswith(("in.", "w."))}
    golden |= {f"peer_in.{name}": value for name, value in fed.items()}
    golden |= steps | {"loss": loss.detach().reshape(1)}
    gradients = dict(peer.model.eagle_module.named_parameters())
    for name in head:
        gradient = gradients[name.replace("midlayer.", "layers.0.")].grad
        if name != WITHOUT_GRADIENT:
            golden[f"grad.{name}"] = gradient
    return {name: value.clone().contiguous() for name, value in golden.items()}


def _record_steps(model: Any) -> dict[str, Tensor]:
    """Filled as the model runs: logits, undecayed loss and accuracy of every step."""
    record: dict[str, Tensor] = {}
    forward, score = model._eagle_forward, model._eagle_loss

    def recorded_forward(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        record[f"step{len(record) // 3}.logits"] = outputs[2].detach().clone()
        return outputs

    def recorded_score(*args: Any, **kwargs: Any) -> Any:
        loss, accuracy = score(*args, **kwargs)
        step = len(record) // 3
        record[f"step{step}.acc"] = accuracy.detach().clone().reshape(1)
        record[f"step{step}.loss"] = loss.detach().clone().reshape(1)
        return loss, accuracy

    model._eagle_forward, model._eagle_loss = recorded_forward, recorded_score
    return record


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    with safe_open(options.inputs, "pt") as file:
        inputs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        dims = json.loads(file.metadata()["settings"])["dims"]
    settings = {
        "peer": "nvidia-modelopt 0.47.0",
        "dims": dims,
        "ttt": STEPS,
        "loss_decay": 0.9,
        "attention": "sdpa",
        "torch_compile": False,
    }
    save_file(make(inputs, dims), options.out, {"settings": json.dumps(settings)})
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
