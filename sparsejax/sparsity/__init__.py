"""Patterns of zeros, masks, and matrices that store only what a mask keeps."""
