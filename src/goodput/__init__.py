"""The goodput command and the verdict of an acceptance run."""
