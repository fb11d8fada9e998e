"""The files of a folder that are a checkpoint's weights, and what is said where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.checkpoints import weight_files
from slipstream.errors import RefusedError
from slipstream.hub import read_json


def test_weight_files_skip_hidden_files(tmp_path: Path) -> None:
    """vLLM reads none either."""
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_missing_checkpoint_folder_refused_by_path(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "polcy"
    for read in (weight_files, lambda folder: read_json(folder / "config.json", "x")):
        with pytest.raises(RefusedError, match="correct the path") as refused:
            read(folder)
        assert refused.value.field == str(folder) and refused.value.found == "no such folder"
    with pytest.raises(RefusedError, match=r"config\.json: found No such file or directory, "):
        read_json(tmp_path / "config.json", "x")
