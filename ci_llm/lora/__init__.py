"""K LoRA adapters on one frozen base: adapted layers, their products, passes through the base, heads."""
