"""LayerSkip's schedules as pure functions: layers count from 0 to L-1, steps from 0 to T-1, as in the paper's 4.1."""

import math

import numpy as np

CONSTANT, EXPONENTIAL = "constant", "exponential"
TIME_CURRICULA = (CONSTANT, EXPONENTIAL)
"""S(t): for a trained model, and for one that begins from scratch."""
ROTATIONAL, GRADUAL = "rotational", "gradual"
EXIT_CURRICULA = (ROTATIONAL, GRADUAL)
"""C(t, l)."""


def dropout_by_layer(num_layers: int) -> np.ndarray:
    """D(l), `[L]`: exponential, from 0 in the first layer to 1 in the last one (equation 3)."""
    return np.expm1(np.arange(num_layers) * math.log(2) / max(num_layers - 1, 1))


def dropout_by_step(curriculum: str, step: int, num_steps: int) -> float:
    """S(t): 1, or exponential from 0 in the first step to 1 in the last one (equation 4)."""
    return 1.0 if curriculum == CONSTANT else math.expm1(step * math.log(2) / max(num_steps - 1, 1))


def dropout_rates(max_dropout: float, curriculum: str, step: int, num_layers: int, num_steps: int) -> np.ndarray:
    """p_{l,t} = S(t) D(l) p_max, `[L]` (equation 2): how likely a sample is to leave out each layer."""
    return dropout_by_step(curriculum, step, num_steps) * dropout_by_layer(num_layers) * max_dropout


def exit_scales(e_scale: float, num_layers: int) -> np.ndarray:
    """e(l), `[L]`: e_scale (0 + 1 + … + l) for an exit; L-1 + e_scale (0 + … + L-2) for full depth (section 4.1.2)."""
    scales = e_scale * np.cumsum(np.arange(num_layers, dtype=float))
    scales[-1] = num_layers - 1 + e_scale * sum(range(num_layers - 1))
    return scales


def rotational_exits(step: int, num_layers: int, rotation: int) -> np.ndarray:
    """C_rot,R, `[L]` bools: every R-th layer, one further each step, so that each comes once in R steps."""
    return np.arange(num_layers) % rotation == step % rotation


def gradual_exits(step: int, num_layers: int, num_steps: int) -> np.ndarray:
    """C_grad, `[L]` bools: from layer L-1 down to 0, one more every T / 2L steps; all of them in the second half."""
    joined = 2 * num_layers * step // num_steps
    return np.arange(num_layers) >= num_layers - 1 - joined


def exit_weights(enabled: np.ndarray, e_scale: float) -> np.ndarray:
    """ẽ(t, l), `[L]`: the enabled exits' scales, which sum to 1 (equation 6).

    Full depth is always enabled, as in the authors' own code: by the letter of C_rot,R it would learn only once in R
    steps, and where nothing but layer 0 is enabled, whose scale is 0, equation 6 would divide by 0.
    """
    enabled = enabled.copy()
    enabled[-1] = True
    weights = np.where(enabled, exit_scales(e_scale, len(enabled)), 0.0)
    return weights / weights.sum()
