"""Files of shared storage: no path leaves the root, and no file is taken at its word."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from rollout_server.control import shared
from slipstream.checkpoints import WEIGHTS_FILE
from slipstream.errors import RefusedError
from slipstream.tensors import spec_of

pytestmark = pytest.mark.contract("hostile peers")


@pytest.mark.parametrize(
    "folder", ["", "/", "..", "a/../b", "./a", "a//b", "/etc", "a\0b", "a/" * 1000 + "a", "a/.."]
)
def test_no_path_leaves_the_root(folder: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for place in (tmp_path, root, root / "a"):
        place.mkdir(exist_ok=True)
        (place / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 2) + b"{}")
    assert list(shared._tensors(root, "a", [])) == []
    with pytest.raises(RefusedError, match="shared_folder"):
        list(shared._tensors(root, folder, []))


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"w": {}},
        {"w": {"data_offsets": []}},
        {"w": {"data_offsets": ["x", 4]}},
        {"w": {"data_offsets": [1 << 70, 4]}},
        {"w": {"data_offsets": [float("inf"), 4]}},
        {"w": {"data_offsets": [-(1 << 62), 4]}},
    ],
    ids=str,
)
def test_damaged_header_is_no_release(header: object, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    text = json.dumps(header).encode()
    (tmp_path / "a" / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(text)) + text)
    spec = spec_of("w", torch.ones(1))
    try:
        ((_, data),) = shared._tensors(tmp_path, "a", [spec])
    except (RefusedError, OSError):
        return
    assert bytes(data) != bytes.fromhex("0000803f")
