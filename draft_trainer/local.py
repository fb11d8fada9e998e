"""``LocalTrainer``: a draft trainer in the policy's own process, and a bridge that feeds it.

For notebooks and single machines. It is what ``draft-trainer serve`` starts, with gRPC on loopback
and states through shared memory, so it keeps the same guarantees. Its training takes turns with the
caller's Python code, which a process of its own does not.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from draft_trainer.config_file import parse_config
from draft_trainer.kernels.library import using_kernels
from draft_trainer.server.app import TrainerServer
from draft_trainer.training.ranks import Ranks
from policy_bridge import BridgeConfig, PolicyBridge
from slipstream.errors import RefusedError
from slipstream.hub import local_folder

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""How long the trainer may take to open the run: it listens already."""


class LocalTrainer(AbstractContextManager["LocalTrainer"]):
    """A trainer and a connected bridge, both stopped at the end of the ``with`` block.

    Args:
        model: the policy.
        draft: the draft to start with: a folder, or its name on the Hugging Face hub.
        config: more of the trainer's configuration, by section as in its TOML file. Without
            ``draft.registry`` releases are in a temporary folder that ends with the block; ports
            that are not named are free ones.
        **bridge: more settings of ``BridgeConfig``; ``run_id`` is "local" unless it is given.

    Attributes:
        address: host:port of the trainer's gRPC service, for `draft-trainer status` and `top`.
        bridge: to capture and to sync with.
        url: of the trainer's page.
        releases: folder of the releases.

    Raises:
        RefusedError: the configuration, the draft or the policy cannot be used, or this process is
            one of several ranks; nothing is left running.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: str | Path,
        config: Mapping[str, Mapping[str, object]] | None = None,
        **bridge: Any,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RefusedError(
                "WORLD_SIZE",
                os.environ["WORLD_SIZE"],
                "one process",
                "start draft-trainer serve, and give every rank a PolicyBridge",
            )
        sections = {name: dict(section) for name, section in (config or {}).items()}
        sections["server"] = {"port": 0, "metrics_port": 0} | sections.get("server", {})
        folder = str(local_folder(str(draft), "draft"))
        with ExitStack() as owned:
            own = sections["draft"] = {"initial": folder} | sections.get("draft", {})
            if "registry" not in own:
                state = owned.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-"))
                own["registry"] = str(Path(state) / "releases")
            settings = parse_config(sections)
            training = settings.training
            owned.enter_context(using_kernels(training.cpu_kernels))
            ranks = Ranks.join(training.rank_timeout_s, training.device)
            trainer = TrainerServer(settings, ranks)
            owned.callback(_stop, trainer)
            trainer.start()
            logger.info("%s", trainer.ready_line)
            named = {"run_id": "local"} | bridge
            self.bridge = PolicyBridge(model, BridgeConfig(trainer.address, **named))
            owned.enter_context(self.bridge)
            if not self.bridge.wait_connected(CONNECT_SECONDS):
                reason = self.bridge.stats().capture_off_reason.partition(". Next step")[0]
                next_step = "give the draft that was made for it; draft-trainer init makes one"
                raise RefusedError("draft", f"{folder} ({reason})", "the policy's own", next_step)
            self.address = trainer.address
            self.url = trainer.ready_line.rpartition("web=")[2]
            self.releases = Path(str(own["registry"]))
            self._owned = owned.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Send what waits, stop the trainer. A second call changes nothing."""
        self._owned.close()


def _stop(trainer: TrainerServer) -> None:
    if not trainer.stop():
        logger.warning("the draft trainer did not end within server.shutdown_timeout_s")
