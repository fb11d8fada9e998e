"""What the policy sends: sessions, checks, the ledger, the replay buffer."""
