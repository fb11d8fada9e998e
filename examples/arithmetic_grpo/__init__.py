"""GRPO on arithmetic with real vLLM; ``python -m examples.arithmetic_grpo.demo`` runs it all."""

import os

# Before torch is imported: three processes share the cores, and OpenMP threads that spin while they
# wait took a pretraining run from 5,000 tokens/s to 47.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
