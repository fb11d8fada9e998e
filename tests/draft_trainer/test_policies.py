"""Policy versions: what is held of them, what is shared, and what a restart reads again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.ingest.policies import MatrixFiles
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import digest


def test_matrices_are_files_by_their_content(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    files = MatrixFiles(folder)
    matrix = torch.randn(6, 4)
    name = digest(matrix)
    for _ in range(2):
        assert torch.equal(files.keep(matrix, name), matrix)
    (folder / f"{'1' * 64}.part").write_bytes(b"half")
    (folder / ".tmpU1Ccwu").write_bytes(b"half, as safetensors leaves it")
    files = MatrixFiles(folder)
    assert [path.name for path in folder.iterdir()] == [f"{name.hex()}.safetensors"]
    mapped = files.read(name.hex())
    (folder / "mine.safetensors").write_bytes(b"not the trainer's")
    files.keep_only(set())
    assert [path.name for path in folder.iterdir()] == ["mine.safetensors"]
    assert torch.equal(mapped, matrix)
    with pytest.raises(RefusedError) as caught:
        files.read(name.hex())
    assert caught.value.code is StatusCode.DATA_LOSS
    other = files.keep(matrix + 1, name)
    assert torch.equal(other, matrix + 1)
    # Its content is what counts at a start.
    with pytest.raises(RefusedError, match="the matrix of this SHA-256"):
        files.read(name.hex())


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "policies").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="symbolic link"):
        MatrixFiles(tmp_path / "policies")


def test_policy_heads_share_equal_matrices_and_stay_bounded() -> None:
    store = PolicyHeads(keep=2)
    embed, rows = torch.randn(24, 16), torch.randn(16, 16)
    store.add(PolicyHead(1, rows, embed))
    store.add(PolicyHead(3, rows + 1, embed.clone()))
    assert store.get(3).embed_tokens is embed
    assert store.tensor(digest(rows)) is rows
    store.add(PolicyHead(4, rows + 2, embed.clone()))
    assert store.versions == (3, 4) and 1 not in store and 4 in store
    assert store.tensor(digest(rows)) is None
    assert store.get(4).embed_tokens is embed
    with pytest.raises(RefusedError, match="policy_version: found 1"):
        store.get(1)
    with pytest.raises(RefusedError, match="higher than 4"):
        store.add(PolicyHead(4, rows, embed))
