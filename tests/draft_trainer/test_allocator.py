"""Memory that was freed is there for the next message, and Python does not look for it there."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

ROUNDS = 50
# Eight messages of a megabyte that wait together, and are gone together: 2048 pages.
SCRIPT = f"""
import resource, sys
from draft_trainer.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
source = bytearray(b"x") * (1 << 20)
def message_round():
    waiting = [bytes(source) for _ in range(8)]
message_round()
message_round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    message_round()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / {ROUNDS})
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_pages_of_freed_messages_are_not_faulted_in_again() -> None:
    faults = {
        how: float(subprocess.check_output([sys.executable, "-c", SCRIPT, how], timeout=120))
        for how in ("kept", "given back")
    }
    assert faults["kept"] < 20
    # What it is for; a glibc that keeps it by itself makes the function superfluous.
    assert faults["given back"] > 1000


COLLECTIONS = """
import gc, sys
from draft_trainer.allocator import settle_collector
if sys.argv[1] == "settled":
    settle_collector()
def message_round():
    waiting = [[number] for number in range(4000)]
before = gc.get_stats()[0]["collections"]
for _ in range(50):
    message_round()
print(gc.get_stats()[0]["collections"] - before, gc.get_freeze_count())
"""


def test_what_is_gone_with_its_message_is_not_looked_at_by_the_collector() -> None:
    found = {}
    for how in ("settled", "as it was"):
        text = subprocess.check_output([sys.executable, "-c", COLLECTIONS, how], timeout=120)
        found[how] = tuple(map(int, text.split()))
    assert found["settled"][0] <= 1 and found["settled"][1] > 1000
    # What it is for; it is of no use with a Python whose first threshold is as high.
    assert found["as it was"][0] > 50 and found["as it was"][1] == 0
