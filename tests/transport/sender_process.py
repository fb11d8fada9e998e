"""A bridge in a process of its own, to be killed: ``python -m ... ADDRESS SHARED_MEMORY SEED``."""

from __future__ import annotations

import itertools
import sys

from .rig import samples, sending


def main() -> None:
    """Send for ever; print how many were acknowledged after every hundred."""
    address, memory, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    given = samples(100, seed)
    with sending(address, shared_memory=memory) as sender:
        for number in itertools.count():
            sender.send(*(s.repacked(sample_id=f"{s.sample_id}-{seed}-{number}") for s in given))
            sender.flush()
            stats = sender.stats()
            lost, why = sum(stats.shed.values()), stats.transport_reason
            print(stats.accepted, stats.transport, lost, stats.connects, why, flush=True)


if __name__ == "__main__":
    main()
