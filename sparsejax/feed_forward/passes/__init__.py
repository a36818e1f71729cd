"""The forward and the backward of each kind of FFN on one device."""
