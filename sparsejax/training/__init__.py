"""The training of a model: the step, the loop over steps, and how it begins again."""
