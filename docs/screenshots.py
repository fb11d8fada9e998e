"""Takes the picture of the page in docs/ from real services: ``python -m docs.screenshots``.

Runs the demo (a real trainer, a real vLLM server, a policy that learns) and, once a release of its
own is served and the policy has come far enough, takes ``docs/web.png`` from the page in Chromium.
Needs ``apt-get install chromium fonts-dejavu-core``.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from functools import partial
from pathlib import Path

import grpc

from slipstream.client import open_channel
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

DOCS = Path(__file__).resolve().parent
END_SECONDS = 120.0
"""The time that the demo may take to end its services."""


def main(argv: list[str] | None = None) -> int:
    """Take the picture; 1 where Chromium is missing or the demo ended early."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.screenshots", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--policy-version", type=int, default=16, help="to stop at (default: 16)")
    parser.add_argument("--release", type=int, default=2, help="that is served then (default: 2)")
    parser.add_argument("--seconds", type=float, default=540.0, help="to give up at (default: 540)")
    parser.add_argument("--prompts", type=int, default=12, help="of the demo, a step (default: 12)")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder (default: docs)")
    options = parser.parse_args(argv)
    if shutil.which("chromium") is None:
        print("not found: chromium; apt-get install chromium")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        demo = subprocess.Popen(
            [
                *(sys.executable, "-m", "examples.arithmetic_grpo.demo", "--speed-rounds", "0"),
                *("--steps", "500", "--prompts", str(options.prompts), "--out", str(run)),
            ],
            # A shell has what runs in the background ignore SIGINT, and children inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        taken = Path(folder) / "taken"
        taken.mkdir()
        try:
            server = _wait(demo, run, options)
            url = f"http://127.0.0.1:{server['metrics_port']}/"
            take_page(url, taken / "web.png", Path(folder), 1400, 1480)
        finally:
            _end(demo)
        for picture in taken.iterdir():
            shutil.copy(picture, options.out)
    return 0


def _end(demo: subprocess.Popen[bytes]) -> None:
    """Interrupt the demo as Ctrl-C does, so that it stops its services; kill it if it does not."""
    if demo.poll() is None:
        demo.send_signal(signal.SIGINT)
    try:
        demo.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        demo.kill()
        raise SystemExit(f"the demo did not end in {END_SECONDS:.0f} s; see its services") from None


def _wait(
    demo: subprocess.Popen[bytes], run: Path, options: argparse.Namespace
) -> dict[str, object]:
    """Until the policy has come far enough; the [server] section of the trainer's config.

    Raises SystemExit: the demo ended, or it did not come so far in ``--seconds``.
    """
    end = time.monotonic() + options.seconds
    config = run / "draft-trainer.toml"
    while not config.exists():
        _check(demo)
        time.sleep(0.5)
    server = tomllib.loads(config.read_text())["server"]
    with open_channel(f"127.0.0.1:{server['port']}") as channel:
        stub, status = pb_grpc.DraftTrainerStub(channel), pb.TrainerStatus()
        while time.monotonic() < end:
            _check(demo)
            with contextlib.suppress(grpc.RpcError):  # it does not listen yet
                status = stub.GetStatus(pb.GetStatusRequest(), timeout=5)
            far = status.policy_version >= options.policy_version
            if far and status.served_release >= options.release and status.last_minute:
                return server
            time.sleep(0.5)
    raise SystemExit(
        f"in {options.seconds:.0f} s the demo came to policy version {status.policy_version} and "
        f"release {status.served_release}; give --policy-version, --release or --seconds"
    )


def _check(demo: subprocess.Popen[bytes]) -> None:
    if demo.poll() is not None:
        raise SystemExit(f"the demo ended with status {demo.returncode}")


def take_page(url: str, picture: Path, scratch: Path, width: int, height: int) -> None:
    """A page as PNG, one and a half device pixels to a CSS pixel."""
    subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", f"--user-data-dir={scratch / 'browser'}"),
            *("--hide-scrollbars", "--force-device-scale-factor=1.5"),
            *(f"--window-size={width},{height}", "--virtual-time-budget=8000"),
            *(f"--screenshot={picture.resolve()}", url),
        ],
        check=True,
        timeout=180,
        capture_output=True,
    )


if __name__ == "__main__":
    sys.exit(main())
