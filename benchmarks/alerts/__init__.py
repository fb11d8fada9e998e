"""Every alert, caused and seen firing: real trainer, real rollout servers, real Prometheus."""
