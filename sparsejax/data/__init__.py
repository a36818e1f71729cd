"""From text and token files to the batches of a run."""
