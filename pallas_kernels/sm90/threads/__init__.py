"""What a single thread of a kernel does with the numbers in its registers."""
