"""From a command line to a run that has begun."""
