"""One data set, model and loss per file."""
