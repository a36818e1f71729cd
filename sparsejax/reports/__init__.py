"""What a run says of itself: records, metrics, evaluations, planned meshes."""
