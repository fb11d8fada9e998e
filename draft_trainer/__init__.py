"""The sidecar: takes verifier states, trains the policy's draft, publishes releases.

``drafters``, ``kernels`` and ``checkpoints`` do without gRPC and Prometheus. ``ingest`` keeps the
samples, ``training`` steps, ``releases`` judges and publishes. ``server`` puts gRPC, metrics and a
page around them, ``cli`` the command line.
"""
