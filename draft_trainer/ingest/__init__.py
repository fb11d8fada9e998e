"""The data that the policy sends: runs, checks, the store, the replay order."""
