"""``LocalTrainer``: a draft trainer in the policy's own process, for notebooks and single machines.

It is what ``draft-trainer serve`` starts, on free ports of the loopback interface, so it keeps the
same guarantees; a ``PolicyBridge`` feeds it by its address. Its training takes turns with the
caller's Python code, which a process of its own does not.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch

from draft_trainer.config_file import parse_config
from draft_trainer.kernels.library import using_kernels
from draft_trainer.server.app import TrainerServer
from slipstream.errors import RefusedError
from slipstream.hub import local_folder
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)


class LocalTrainer(AbstractContextManager["LocalTrainer"]):
    """A trainer that stops at the end of the ``with`` block. Close the bridges that feed it first.

    Args:
        draft: the draft to start with: a folder, or its name on the Hugging Face hub.
        config: more of the trainer's configuration, by section as in its TOML file. Without
            ``draft.registry`` releases are in a temporary folder that ends with the block. Ports
            that are not named are free ones.

    Attributes:
        address: host:port of the trainer, for ``BridgeConfig`` and for `draft-trainer status`.
        url: of the trainer's page.
        releases: folder of the releases.
        config: the whole configuration.

    Raises:
        RefusedError: the configuration or the draft cannot be used, it bounds this process's GPU
            memory, or this process is one of several ranks; nothing is left running.
    """

    def __init__(
        self, draft: str | Path, config: Mapping[str, Mapping[str, object]] | None = None
    ) -> None:
        if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise RefusedError(
                "WORLD_SIZE",
                size,
                "one process",
                "start draft-trainer serve, and give every rank a PolicyBridge",
            )
        sections = {name: dict(section) for name, section in (config or {}).items()}
        sections["server"] = {"port": 0, "metrics_port": 0} | sections.get("server", {})
        initial = str(local_folder(str(draft), "draft"))
        with ExitStack() as owned:
            own = sections["draft"] = {"initial": initial} | sections.get("draft", {})
            if "registry" not in own:
                state = owned.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-"))
                own["registry"] = str(Path(state) / "releases")
            settings = parse_config(sections)
            training = settings.training
            if training.gpu_memory_fraction < 1.0:
                raise RefusedError(
                    "training.gpu_memory_fraction",
                    training.gpu_memory_fraction,
                    "1: it would bound the policy too, which is in this process",
                    "leave it out, or start draft-trainer serve",
                )
            owned.enter_context(using_kernels(training.cpu_kernels))
            trainer = TrainerServer(settings)
            owned.callback(_restore_threads)
            owned.callback(_stop, trainer)
            trainer.start()
            logger.info("%s", trainer.ready_line)
            self.address = trainer.address
            self.url = trainer.ready_line.rpartition("web=")[2]
            self.releases = settings.draft.registry
            self.config = settings
            self._trainer = trainer
            self._owned = owned.pop_all()
        # A thread that is inside torch while the interpreter ends aborts the process.
        atexit.register(self._close_at_exit, os.getpid())

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the trainer. A second call changes nothing."""
        self._owned.close()
        atexit.unregister(self._close_at_exit)

    def status(self) -> pb.TrainerStatus:
        """The trainer's status now, as `draft-trainer status` shows it."""
        return self._trainer.status.read()

    def verdicts(self) -> list[release_pb2.Verdict]:
        """The gate's verdicts that are kept, oldest first; with those before a restart."""
        return self._trainer.status.verdicts()

    def _close_at_exit(self, process: int) -> None:
        # Not in a forked child, which has no threads of ours.
        if os.getpid() == process:
            self.close()


def _restore_threads() -> None:
    """Restore the default for new threads, which the training thread's own setting replaced."""
    torch.set_num_threads(torch.get_num_threads())


def _stop(trainer: TrainerServer) -> None:
    if not trainer.stop():
        logger.warning("the draft trainer did not stop within server.shutdown_timeout_s")
