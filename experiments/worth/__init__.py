"""What an arm of a comparison is worth: the tokens and seconds to its loss."""
