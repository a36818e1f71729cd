"""The work of a single thread of a kernel on the numbers in its registers."""
