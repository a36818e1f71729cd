"""The tiles of features and of rows that sizes are rounded up to."""

import math

FEATURE_TILE = 16
"""The features of one tile. The dense features of GEMMs 5 and 6 are rounded up to whole
tiles, the row granularity of the tensor-core instructions that multiply them."""


def dense_feature_count(features: int, share: float) -> int:
    """Returns how many features stay dense: `share` of them, rounded up to whole
    feature tiles."""
    return min(math.ceil(share * features / FEATURE_TILE) * FEATURE_TILE, features)


GROUP_TILE = 128
"""The number of rows of one expert that sparse tensor cores take together."""


def group_tile(v: int) -> int:
    """Returns the number that sparse tensor cores pad an expert's rows to a multiple
    of, at least V. It pads more than V does, and changes no value."""
    return math.ceil(v / GROUP_TILE) * GROUP_TILE
