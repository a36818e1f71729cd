"""How tokens lie over the experts of a benchmark."""

import numpy as np


def expert_shares(experts: int, share_of_first: float) -> np.ndarray:
    """Of all tokens: what the first expert does not have, the others share equally."""
    if not 0 < share_of_first < 1 or experts == 1:
        raise ValueError(
            f"share_of_first={share_of_first} of {experts} experts: give a share "
            f"between 0 and 1, and two experts or more"
        )
    others = (1 - share_of_first) / (experts - 1)
    return np.array([share_of_first] + [others] * (experts - 1))
