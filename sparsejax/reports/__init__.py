"""The reports of a run: records, metrics, throughput, the times of its steps."""
