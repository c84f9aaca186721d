"""`infoflow-kv eval predict | score | report | generate`: the laboratory. One file per verb."""

import typer

from infoflow_kv.cli.evaluation.generate import needles, tracking
from infoflow_kv.cli.evaluation.predict import predict
from infoflow_kv.cli.evaluation.report import report
from infoflow_kv.cli.evaluation.score import score
from infoflow_kv.cli.options import flowing

HELP = ["-h", "--help"]

evaluation = typer.Typer(
    no_args_is_help=True,
    help="Compare methods fairly: same token ids, same budget, paired statistics.",
    context_settings={"help_option_names": HELP},
)
generate = typer.Typer(
    no_args_is_help=True,
    help="Make questions of a wanted length and difficulty: needles, variable tracking.",
    context_settings={"help_option_names": HELP},
)

for verb in (predict, score, report):
    evaluation.command(help=flowing(verb.__doc__))(verb)
for name, maker in (("niah", needles), ("vt", tracking)):
    generate.command(name, help=flowing(maker.__doc__))(maker)
evaluation.add_typer(generate, name="generate")
