"""A trainer in a process of its own, to be killed: ``python -m ... FOLDER SHARED_MEMORY``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.draft_trainer.rig import make_config, running


def main() -> None:
    """Print the address once policy version 1 is known; end when standard input does."""
    folder, memory = Path(sys.argv[1]), sys.argv[2]
    config = make_config(folder, server={"shared_memory": memory})
    with running(config, train=False) as (server, client):
        if client.open().latest_policy_version == 0:
            client.announce(1)
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
