"""Decides whether the next window captures: the versions, the trainer and the switch together."""

from __future__ import annotations

from policy_bridge.config import BridgeConfig
from policy_bridge.session import Session
from policy_bridge.shipper import Shipper
from policy_bridge.stats import Counters
from policy_bridge.switch import CaptureSwitch, Cause
from slipstream.refusal import RefusedError

# Samples refused in a row, with none taken between them, after which no more of a version go out.
_REFUSALS = 16


class CaptureGate:
    """What a bridge may capture now. Used from the training loop's thread.

    Args:
        config: of the bridge.
        switch: where refusals stand.
        counters: what the trainer answered.
        shipper: the way to the trainer; None where the policy cannot be captured.

    Attributes:
        version: the highest version whose sync ended well; None before it.
        session: whose rows were copied at that sync; None if none were.
    """

    def __init__(
        self,
        config: BridgeConfig,
        switch: CaptureSwitch,
        counters: Counters,
        shipper: Shipper | None,
    ) -> None:
        self._config = config
        self._switch = switch
        self._counters = counters
        self._shipper = shipper
        self.version: int | None = None
        self.session: Session | None = None

    @property
    def connected(self) -> bool:
        """Whether a run is open now."""
        return self._shipper is not None and self._shipper.connected

    def session_for(self, version: int) -> Session | None:
        """The run that ``version`` belongs to; None if it can belong to none."""
        session = None
        if self._shipper is not None:
            if self.version is None:
                # Once: a loop must not wait for an absent trainer in every step.
                self._shipper.wait_first_attempt(self._config.connect_seconds)
            session = self._shipper.session
            self.check_trainer()
        known = session.latest_policy_version if session and self.version is None else None
        floor = max((v for v in (self.version, known) if v is not None), default=None)
        # The first version of a bridge may be the trainer's newest: a policy that was resumed.
        again = self.version is None and version == known
        if floor is not None and version <= floor and not again:
            error = RefusedError(
                "policy_version",
                version,
                f"> {floor}",
                "count the policy's versions up; another run_id begins anew",
            )
            self._switch.refuse(Cause.VERSION, error)
            return None
        self._switch.clear(Cause.VERSION)
        return session

    def synced(self, version: int, session: Session | None) -> None:
        """A sync ended well; ``session`` is whose rows were copied for it."""
        self.version = max(version, self.version or 0)
        self.session = session
        self._counters.forgive_refusals()
        self._switch.clear(Cause.TRAINER)

    def check_trainer(self) -> None:
        """Turn capture off if the trainer refuses what it is sent, or if nobody is left to send."""
        refusal = self._counters.run_refusal
        count, field = self._counters.refused_in_a_row
        if self._shipper is not None and self._shipper.died:
            error = RefusedError(
                "bridge",
                "its thread to the trainer ended of an error",
                "a bridge that can send",
                "report the traceback that it printed; a PolicyBridge built anew captures again",
            )
            self._switch.refuse(Cause.BRIDGE, error)
        elif refusal is not None and not self.connected:
            self._switch.refuse(Cause.TRAINER, refusal)
        elif count >= _REFUSALS:
            error = RefusedError(
                f"samples.{field}",
                f"{count} samples in a row refused for it",
                "samples that the trainer takes",
                "see the trainer's log for what it found; the next version is tried again",
            )
            self._switch.refuse(Cause.TRAINER, error)
        elif self.connected:
            self._switch.clear(Cause.TRAINER)

    def off_reason(self) -> str:
        """Why a window would take nothing now; empty if it would take states."""
        standing = self._switch.reason(Cause.MODEL, Cause.BRIDGE, Cause.VERSION, Cause.TRAINER)
        if standing:
            return standing
        if not self._config.bytes_per_step:
            return "bytes_per_step is 0"
        if self.version is None:
            return "no policy version was synced yet"
        wanted = self._shipper.session if self._shipper is not None else None
        if wanted is None:
            refusal = self._counters.run_refusal
            if refusal is not None:
                return str(refusal)
            return f"the draft trainer at {self._config.trainer} was not reached"
        if self.session is None or not self.session.same_shape(wanted):
            # Nobody copied this version's matrices while no trainer said which rows it wants.
            return f"the draft trainer came after version {self.version} was synced"
        return ""
