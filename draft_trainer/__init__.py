"""The sidecar: takes verifier states, trains the EAGLE-3 draft head, publishes releases.

The core (head, objective, replay, learner, gate, releases) knows torch and
safetensors only. ``service`` and ``server`` put gRPC around it, ``metrics``
Prometheus, ``cli`` the command line.
"""
