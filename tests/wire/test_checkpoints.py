"""Which files of a folder are a checkpoint's weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.checkpoints import weight_files


def test_hidden_files_are_no_weights(tmp_path: Path) -> None:
    """vLLM reads none either."""
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
