"""K LoRA adapters on one frozen base: their layers, storage, passes and optimizer steps."""
