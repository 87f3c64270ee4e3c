"""The policy of `auto`: measured costs, expected tokens, and the choice per round."""
