"""Ways in which tokens may lie over experts."""

GROUP_TILE = 128
GROUPS = {
    "even": [1, 1, 1],
    "uneven": [3, 1, 2],
    "an empty one between": [2, 0, 1],
    "all of one": [0, 4, 0],
    "none": [0, 0, 0],
}
"""Group tiles of each expert."""
UNUSED = 2
"""Group tiles after the used ones."""
