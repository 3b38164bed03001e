"""`dsimg serve`: one process that answers HTTP with an exported run."""
