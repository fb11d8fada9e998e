"""Runnable examples for Slipstream."""

# Before gRPC, as users import policy_bridge: it turns off gRPC's fork handlers.
import slipstream as slipstream
