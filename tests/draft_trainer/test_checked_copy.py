"""The one-pass copy against the four passes that it stands in for, and both against xxhash."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from draft_trainer.kernels import checked_copy
from draft_trainer.kernels.checked_copy import copies_checked, fits_copies, fused_copy_checked
from draft_trainer.kernels.library import all_kernels, using_kernels
from slipstream.checksum import CRC32, XXH3_64, Bytes, all_finite, checksum_of, copy_checked
from slipstream.errors import RefusedError

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
# Of a stripe more and less than whole blocks of the hash, and of several.
SIZES = [16448, 17344, 17408, 17472, 64 * 1001, 1 << 20]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with using_kernels("on"):
        yield


def aligned(nbytes: int) -> Bytes:
    """Zeros that begin at a multiple of 64."""
    memory = np.zeros(nbytes + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


def finite_bytes(nbytes: int, seed: int) -> Bytes:
    """Random ones, no exponent of which is all ones in any of the formats."""
    values = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return values & 0xBB


@pytest.mark.parametrize("nbytes", SIZES)
def test_it_copies_and_hashes_as_xxhash_whatever_the_pieces(nbytes: int) -> None:
    rng = random.Random(nbytes)
    for number in range(8):
        source = finite_bytes(nbytes, number)
        cuts = sorted({0, nbytes, *[64 * rng.randrange(nbytes // 64) for _ in range(number)]})
        pieces = [source[start:end] for start, end in itertools.pairwise(cuts)]
        copy = aligned(nbytes)
        checksum, finite = fused_copy_checked(pieces, copy, XXH3_64, torch.bfloat16, 64 * number)
        assert checksum == xxh3_64_intdigest(source) and finite
        assert np.array_equal(copy, source)


@pytest.mark.parametrize("nbytes", [256, 320, 1024, 1088, 2432, 8512])
def test_many_are_copied_and_hashed_each_for_itself(nbytes: int) -> None:
    states_at, count = 64 * (nbytes // 192), 9
    source = finite_bytes(10 * nbytes + 2000, 0)
    # From anywhere, out of order, some of them overlapping.
    starts = [1000 + 100 * number + nbytes * (number * 5 % count) for number in range(count)]
    infinity = np.array([0x7F80], dtype=np.uint16).view(np.uint8)
    # The last float of one, the first of another, and one that is none, before them.
    for number, at in ((2, nbytes - 2), (5, states_at), (7, states_at - 2)):
        source[starts[number] + at : starts[number] + at + 2] = infinity
    blocks = [source[start : start + nbytes] for start in starts]
    finite = [all_finite(block[states_at:], torch.bfloat16) for block in blocks]
    assert 2 <= finite.count(False) < count
    copies = aligned(count * (nbytes + 64)).reshape(count, nbytes + 64)[::-1]
    kernels = all_kernels()
    assert kernels is not None and fits_copies(nbytes, XXH3_64, states_at)
    checksums, found = copies_checked(
        kernels,
        [source.ctypes.data + start for start in starts],
        [copy.ctypes.data for copy in copies],
        nbytes,
        torch.bfloat16,
        states_at,
    )
    assert checksums == [xxh3_64_intdigest(block) for block in blocks]
    assert found.tolist() == finite
    assert np.array_equal(copies[:, :nbytes], np.stack(blocks)) and not copies[:, nbytes:].any()


def test_what_many_are_not_copied_as() -> None:
    assert not fits_copies(192, XXH3_64, 64)
    assert not fits_copies(1024, CRC32, 64)
    assert not fits_copies(1056, XXH3_64, 64)
    assert not fits_copies(1024, XXH3_64, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    nbytes, states_at = 17408, 640
    clean = finite_bytes(nbytes, 0)
    wholes = {torch.float16: (0x7C00, 0xFE01), torch.bfloat16: (0x7F80, 0xFFC0)}
    bad = {
        torch.float32: [np.uint32(0x7F80_0000), np.uint32(0xFFC0_0001)],
        torch.float8_e4m3fn: [np.uint8(0x7F), np.uint8(0xFF)],
    }.get(dtype) or [np.uint16(bits) for bits in wholes[dtype]]
    for bits in bad:
        item = bits.dtype.itemsize
        # The first byte of the states, a stripe's last float, the last one of all; none before.
        for at in (0, states_at - item, states_at, states_at + 64 - item, nbytes - item):
            source = clean.copy()
            source[at : at + item] = np.frombuffer(bits.tobytes(), dtype=np.uint8)
            given = ([source], aligned(nbytes), XXH3_64, dtype, states_at)
            found = fused_copy_checked(*given)
            assert found == copy_checked(*given)
            assert found[1] == (at < states_at), at


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_bit_pattern_is_judged_as_torch_judges_it(dtype: torch.dtype) -> None:
    kind = np.uint8 if dtype.itemsize == 1 else np.uint16
    for first in range(0, 1 << 8 * dtype.itemsize, 16):
        patterns = np.arange(first, first + 16, dtype=kind)
        finite = torch.isfinite(torch.from_numpy(patterns.view(np.uint8)).view(dtype).float())
        source = np.zeros(16448, dtype=np.uint8)
        source[-patterns.nbytes :] = patterns.view(np.uint8)
        _, found = fused_copy_checked([source], aligned(16448), XXH3_64, dtype, 0)
        assert found == bool(finite.all()), hex(first)


def test_what_it_cannot_do_in_one_pass_is_done_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """CRC-32, few bytes, pieces of half a stripe, and memory that begins anywhere."""
    called = []

    def several(*given: object) -> tuple[int, bool]:
        called.append(given)
        return copy_checked(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(checked_copy, "copy_checked", several)
    source = finite_bytes(20480, 0)
    halves = [source[:4000], source[4000:]]
    for pieces, to, kind in (
        ([source], aligned(20480), CRC32),
        ([source[:8192]], aligned(8192), XXH3_64),
        (halves, aligned(20480), XXH3_64),
        ([source], aligned(20544)[16:20496], XXH3_64),
    ):
        checksum, finite = fused_copy_checked(pieces, to, kind, torch.bfloat16, 0)
        assert checksum == checksum_of(pieces, kind) and finite
        assert np.array_equal(to, np.concatenate(pieces))
    assert len(called) == 4
    assert fused_copy_checked([source], aligned(20480), XXH3_64, torch.bfloat16, 0)[1]
    assert len(called) == 4
    with pytest.raises(RefusedError, match="checksum_kind"):
        fused_copy_checked([source], aligned(20480), 99, torch.bfloat16, 0)
