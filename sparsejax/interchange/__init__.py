"""Models as the rest of the ecosystem reads and writes them."""
