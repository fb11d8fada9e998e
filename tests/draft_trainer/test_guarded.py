"""A file that is cut short while it is read: an error by name, where it is SIGBUS otherwise."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from draft_trainer.kernels.checked_copy import fused_copy_checked
from draft_trainer.kernels.guarded import SourceGoneError, guarded_gather
from draft_trainer.kernels.library import all_kernels, using_kernels
from slipstream.checksum import CRC32, XXH3_64, Bytes

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)

PAGE = mmap.PAGESIZE
SIZE = 64 * PAGE


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with using_kernels("on"):
        yield


@pytest.fixture
def mapped() -> Iterator[tuple[int, Bytes]]:
    """A file's descriptor, and its mapping: uint8 [SIZE] of bytes that are finite numbers."""
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        memory = np.frombuffer(mmap.mmap(file.fileno(), SIZE), dtype=np.uint8)
        memory[:] = np.arange(SIZE) % 60
        yield file.fileno(), memory


@pytest.mark.parametrize("nbytes", [0, PAGE, SIZE - PAGE])
@pytest.mark.parametrize("kind", [XXH3_64, CRC32])
def test_a_copy_of_what_is_gone_is_an_error_and_the_next_one_works(
    mapped: tuple[int, Bytes], nbytes: int, kind: int
) -> None:
    file, memory = mapped
    os.ftruncate(file, nbytes)
    copy, library = np.zeros(SIZE, dtype=np.uint8), all_kernels()
    assert library is not None
    for _ in range(3):
        with pytest.raises(SourceGoneError):
            fused_copy_checked([memory], copy, kind, torch.bfloat16, 0)
        with pytest.raises(SourceGoneError):
            guarded_gather(library, [memory[:64], memory[-64:]], copy[:128])
    sound = np.arange(SIZE, dtype=np.uint8) % 60
    checksum, finite = fused_copy_checked([sound], copy, XXH3_64, torch.bfloat16, 0)
    assert finite and checksum == xxh3_64_intdigest(sound)
    assert np.array_equal(copy, sound)


def test_every_thread_has_its_own_guard(mapped: tuple[int, Bytes]) -> None:
    file, memory = mapped
    os.ftruncate(file, 0)
    rounds, found = 200, []

    def read(number: int) -> None:
        copy = np.zeros(SIZE, dtype=np.uint8)
        sound = np.full(SIZE, number, dtype=np.uint8)
        for _ in range(rounds):
            with pytest.raises(SourceGoneError):
                fused_copy_checked([memory], copy, XXH3_64, torch.bfloat16, 0)
            checksum, _ = fused_copy_checked([sound], copy, XXH3_64, torch.bfloat16, 0)
            found.append(checksum == xxh3_64_intdigest(sound) and copy[-1] == number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert found == [True] * (4 * rounds)


def test_a_fault_that_is_not_ours_still_ends_the_process() -> None:
    code = """
import mmap, sys, tempfile
from draft_trainer.kernels.library import use_kernels
use_kernels("on")
file = tempfile.TemporaryFile()
file.truncate(4096)
memory = mmap.mmap(file.fileno(), 4096)
file.truncate(0)
print("reading", flush=True)
memory[0]
print("read", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "reading\n")
