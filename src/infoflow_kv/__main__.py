"""`python -m infoflow_kv` is the command `infoflow-kv`."""

from infoflow_kv.cli import program

program()
