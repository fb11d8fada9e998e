"""A second policy and task: a Llama-style model that sorts letters by selection."""
