"""What follows from a token using the neurons of its experts only."""
