"""What compares finished runs: their files, tables, curves and processes."""
