"""The tables, figures and numbers of "Fail Fast, Win Big" from records."""
