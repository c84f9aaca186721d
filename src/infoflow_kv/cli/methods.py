"""`infoflow-kv methods`: the table of methods."""

from infoflow_kv.cli import options
from infoflow_kv.cli.output import emit_json, emit_table


def methods(as_json: options.Json = False) -> int:
    """List the methods that --method takes, and where each rule comes from.

    Examples:

    \b
        infoflow-kv methods
        infoflow-kv methods --json | head -1
    """
    from infoflow_kv.methods import METHODS

    if as_json:
        for m in METHODS.values():
            emit_json({"name": m.name, "rule": m.rule, "source": m.source, "reuse": m.reuse})
    else:
        emit_table(("method", "rule", "source"), [(m.name, m.rule, m.source) for m in METHODS.values()])
    return 0
