"""The command `sparsejax`, a module for each of its parts."""
