"""Policy versions: what is held of them, what is shared, and what a restart reads again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draft_trainer.drafters import policy
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.ingest.policies import EMBED_TOKENS, MatrixFiles, receive_matrices
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import bytes_of, difference, digest, spec_of
from slipstream.v1 import tensor_pb2
from tests.gpu.shortages import shortage


def test_policy_matrices_are_files_by_sha256(tmp_path: Path) -> None:
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


def test_policy_folder_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "policies").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="symbolic link"):
        MatrixFiles(tmp_path / "policies")


def test_policy_heads_share_matrices_and_are_bounded() -> None:
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


def test_policy_heads_make_room_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of a kibibyte are kept there; a device with room for two gets the third all the same."""
    store, device, embed = PolicyHeads(keep=4), torch.device("meta"), torch.randn(24, 16)
    room, made = 2048, policy._Copies.made
    copied: list[int] = []

    def on_a_small_device(
        rows: torch.Tensor, bias: torch.Tensor | None, device: torch.device
    ) -> object:
        copied.append(store._device_bytes())
        if store._device_bytes() + rows.nbytes > room:
            raise shortage("beside the allocator")
        return made(rows, bias, device)

    monkeypatch.setattr(policy._Copies, "made", on_a_small_device)
    for version in range(4):
        store.add(PolicyHead(version, torch.randn(16, 16), embed, torch.randn(16)))
    heads = [store.get(version) for version in range(4)]
    there = store.on(heads[0], device)
    assert there.lm_head_rows.device == device and there.embed_tokens is embed
    assert there.lm_head_bias is not None and there.lm_head_bias.device == device
    store.on(heads[1], device)
    assert store.on(heads[0], device).lm_head_rows is there.lm_head_rows
    store.on(heads[2], device)
    # The third was tried beside two others, and then alone.
    assert copied == [0, 1024, 2048, 0]
    monkeypatch.setattr(policy, "_DEVICE_BYTES", 1024)
    store.on(heads[3], device)
    assert copied[4:] == [0] and store._device_bytes() == 1024
    # A version that is not held any more keeps nothing there; a batch may still have its head.
    for version in range(4, 8):
        store.add(PolicyHead(version, torch.randn(16, 16), embed, torch.randn(16)))
    assert store._device_bytes() == 0
    assert store.on(heads[3], device).lm_head_rows.device == device


ROWS, WIDTH = 3 << 10, 1 << 10
BASE = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
MOVED = BASE.clone()
MOVED[::7, 5] = 1.0


def received_as(
    base: torch.Tensor, changes: list[tuple[int, bytes]], declared: bytes = b"base"
) -> torch.Tensor:
    """The tensor that is received as differences, by offset, from ``base``; MOVED is declared."""
    chunks = [
        tensor_pb2.TensorChunk(name=EMBED_TOKENS, offset=offset, data=data)
        for offset, data in changes
    ]
    specs = {EMBED_TOKENS: spec_of(EMBED_TOKENS, MOVED)}
    bases = {EMBED_TOKENS: declared, "another": b"base"}
    return receive_matrices(specs, bases, chunks, {b"base": base}.get)[EMBED_TOKENS]


def changes(step: int) -> list[tuple[int, bytes]]:
    new, old = bytes_of(MOVED), bytes_of(BASE)
    blocks = [slice(at, at + step) for at in range(0, len(new), step)]
    return [(block.start, difference(new[block], old[block])) for block in blocks]


BLOCK = 1 << 20


@pytest.mark.parametrize("step", [1000, BLOCK, 4 << 20])
def test_differences_of_any_blocks_make_the_tensor(step: int) -> None:
    assert torch.equal(received_as(BASE, changes(step)), MOVED)


@pytest.mark.parametrize(
    ("base", "sent", "found"),
    [
        (BASE.half(), changes(BLOCK), "bases.embed_tokens.weight: found 62617365"),
        (BASE[1:], changes(BLOCK), "bases.embed_tokens.weight: found 62617365"),
        (BASE.float(), changes(BLOCK), "bases.embed_tokens.weight: found 62617365"),
        (BASE + 1, changes(BLOCK), "sha256"),
        (BASE, changes(BLOCK)[::-1], "offset"),
        (BASE, changes(BLOCK)[1:], "offset"),
        (BASE, changes(BLOCK)[:-1], "5242880 bytes"),
        (BASE, [*changes(BLOCK), (6 << 20, bytes(4))], "a difference of at most 0 bytes"),
        (BASE, [((1 << 64) - 1, changes(BLOCK)[0][1])], "a difference of at most 0 bytes"),
        (BASE, [(5, changes(BLOCK)[0][1])], "offset"),
        (BASE, [(0, changes(BLOCK)[0][1][:-1])], "a difference"),
        (BASE, [(0, bytes(bytes_of(MOVED)[:BLOCK]))], "found 1048576 bytes"),
        # Eight bytes for the whole of a tensor.
        (BASE, [(0, np.array([BASE.numel(), 0], "<u4").tobytes())], "at most 4194304 bytes"),
        (BASE, changes(6 << 20), "at most 4194304 bytes"),
    ],
)
def test_differences_of_another_base_are_refused(
    base: torch.Tensor, sent: list[tuple[int, bytes]], found: str
) -> None:
    with pytest.raises(RefusedError, match=found):
        received_as(base, sent)
    with pytest.raises(RefusedError, match="bases") as caught:
        received_as(base, sent, declared=b"forgotten")
    assert caught.value.code is StatusCode.FAILED_PRECONDITION
