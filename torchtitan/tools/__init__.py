"""Commands that are used beside the training. Nothing in the package imports them."""
