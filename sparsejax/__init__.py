"""Pre-train language models faster on sparse tensor cores."""
