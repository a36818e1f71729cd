"""What a run says of itself: records, metrics, throughput, the times of its steps."""
