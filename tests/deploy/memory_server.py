"""``rollout-server serve``'s control plane over an engine in memory: what tests have Ray place."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.publish_faults.server_process import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("draft")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--control-port", type=int, required=True)
    for option in ("--host", "--port", "--control-host"):
        parser.add_argument(option, required=True)
    args = parser.parse_args()
    if args.draft == "refuse":
        sys.exit(2)
    serve(args.draft, args.control_port, str(args.folder / f"fault-{args.control_port}"))
