"""`python -m infoflow_kv` is the command `infoflow-kv`."""

import sys

from infoflow_kv.cli import main

sys.exit(main())
