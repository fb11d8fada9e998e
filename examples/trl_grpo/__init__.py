"""TRL's GRPOTrainer on the arithmetic task; ``python -m examples.trl_grpo.train`` runs it all."""
