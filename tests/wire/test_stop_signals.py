"""SIGTERM and SIGINT stop a service however many come, and at whatever moment."""

from __future__ import annotations

import subprocess
import sys

# A second signal before every line that the handler of the first one runs, in any module.
CODE = """
import signal, sys
from slipstream.serving.server import stop_signals

stopping = stop_signals()
assert not stopping()

def again(frame, event, argument):
    signal.raise_signal(signal.SIGINT)
    return again

sys.settrace(again)
signal.raise_signal(signal.SIGTERM)
sys.settrace(None)
assert stopping()
"""


def test_stop_signal_during_handler_does_not_deadlock() -> None:
    subprocess.run([sys.executable, "-c", CODE], timeout=60, check=True)
