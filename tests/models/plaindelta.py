"""The gated delta rule in NumPy, float64, token by token: the oracle of its two forms."""

import numpy as np


def delta(s, q, k, v, g, beta):
    """State [H, K, V] and outputs [T, H, V] after tokens; g [T, H] or [T, H, K] is a logarithm."""
    s, outputs = np.array(s, np.float64), []
    for t in range(len(q)):
        for h in range(len(s)):
            decayed = np.exp(np.float64(g[t, h])) * np.ones(s.shape[1])
            s[h] = decayed[:, None] * s[h]
            missing = v[t, h] - k[t, h] @ s[h]
            s[h] = s[h] + beta[t, h] * np.outer(k[t, h], missing)
        outputs.append([q[t, h] @ s[h] for h in range(len(s))])
    return s, np.array(outputs)
