"""Theorem 4.1 of the paper, as functions of plain numbers. The unit of time and of compute is one layer's pass."""


def expected_latency(num_layers: int, exit_layer: int, match_rate: float, num_new_tokens: int) -> float:
    """Expected latency in layer times: `d·ℓ − (d − d̄)(ℓ − 1)·p` (Theorem 4.1, for d̄ ≥ d/2)."""
    saved = (num_layers - exit_layer) * (num_new_tokens - 1) * match_rate
    return num_layers * num_new_tokens - saved


def latency_ratio(num_layers: int, exit_layer: int, match_rate: float, num_new_tokens: int) -> float:
    """Expected latency as a share of ordinary decoding's, `d·ℓ` (Theorem 4.1)."""
    ordinary = num_layers * num_new_tokens
    return expected_latency(num_layers, exit_layer, match_rate, num_new_tokens) / ordinary


def expected_compute(num_layers: int, exit_layer: int, k: int, match_rate: float, num_new_tokens: int) -> float:
    """Expected layer passes of all processes: the latency's, and k(d − d̄) for every token (Theorem 4.1)."""
    early = k * (num_layers - exit_layer) * num_new_tokens
    return expected_latency(num_layers, exit_layer, match_rate, num_new_tokens) + early


def realised_saving(measured_ratio: float, predicted_ratio: float) -> float:
    """The share of the predicted saving that was measured: `(1 − measured) / (1 − predicted)`; below 1 falls short."""
    return (1 - measured_ratio) / (1 - predicted_ratio)
