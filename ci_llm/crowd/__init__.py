"""K agents on one frozen base: the fused pass, the objective, the aggregated answer."""
