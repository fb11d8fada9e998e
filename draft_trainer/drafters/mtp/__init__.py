"""Native multi-token-prediction heads: one decoder layer over the policy's own final state."""
