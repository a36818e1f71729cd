"""The comparison of finished runs: their files, tables, curves and processes."""
