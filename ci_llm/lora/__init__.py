"""K adapters on one frozen base: layers, storage, the fused pass, what moves them. Knows nothing of answers."""
