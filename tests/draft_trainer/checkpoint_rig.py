"""Small checkpoints on disk, and ways to spoil them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.eagle3.head import Eagle3Head
from slipstream.checkpoints import d2t_of
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, draft_vocab_ids, head

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def d2t() -> Tensor:
    return d2t_of(draft_vocab_ids())


def saved(folder: Path, seed: int = 1, **options: Any) -> Eagle3Head:
    """A random head, saved in float32."""
    layout = options.pop("layout", "plain")
    model = head(seed, **options)
    if model.embed_tokens is not None:
        torch.nn.init.normal_(model.embed_tokens.weight)
    Eagle3().save(folder, model, torch.float32, layout=layout)
    return model


def policy_folder(folder: Path, embeddings: Tensor | None = None, **sizes: int) -> Path:
    """A policy's folder, with no more in it than a draft's reader looks at."""
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 10}
    path = folder / "policy"
    path.mkdir(exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config | sizes))
    given = torch.randn(VOCAB, HIDDEN) if embeddings is None else embeddings
    save_file({"model.embed_tokens.weight": given}, path / WEIGHTS)
    return path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Set or, with None, remove tensors; "__" stands for a dot."""
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / WEIGHTS)
