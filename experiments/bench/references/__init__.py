"""What the benchmarks hold their GEMMs, FFNs and steps against."""
