"""The laboratory's runs behind docs/results*.md: which sets, which arms, how many items. Resumable; hours on two cores.

Each set is one run folder under benchmarks/results/lab; `tools/write_results.py` makes the pages from them. The first
items of a file are measured here; layer sets were calibrated, and selectors tried out, on items from its end.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "lab"
MADE = Path(__file__).parent / "made"

CORE = (
    "full,none,random@.15,epic@.05,epic@.15,epic@.3,cacheblend@.02,cacheblend@.05,cacheblend@.15,cacheblend@.3,"
    "cacheblend-gradual@.15,infoflow@.02,infoflow@.05,infoflow@.15,infoflow@.3,influence@.02,influence@.05,"
    "influence@.15,influence@.3,infoflow[layers=relative]@.15,infoflow-l2@.15,prophetkv@.15,influence[layers=all]@.15,"
    "a3@.15,infoflow[reorder]@.15,infoflow[geometry=HL-HP]@.15,infoflow[geometry=HL-TP]@.15,"
    "infoflow[geometry=TL-TP]@.15,oracle@.15"
)
WRITING = "epic@0.15,cacheblend@0.15,infoflow@0.15,influence@0.15,infoflow[reorder]@0.15"
FEW = "full,none,epic@.15,cacheblend@.15,infoflow@.15,influence@.15"
ABLATIONS = (
    "full,none,infoflow@.15,influence@.15,infoflow[repair_layers=0-14]@.15,infoflow[repair_layers=15-29]@.15,"
    "influence[repair_layers=0-14]@.15,infoflow[chunk_floor=0.3]@.15,infoflow[chunk_cap=0.3]@.15,"
    "influence[chunk_cap=0.3]@.15,infoflow-vatp@.15,infoflow-entropy@.15,seam,infoflow@auto:0.8,influence@auto:0.8"
)
NEEDLES = "full,none,epic@.15,cacheblend@.15,infoflow@.15"
# Smaller than the chunks of a run, so that every passage is one.
ESSAYS = ("niah", "--essays", "needle/essays", "--chunk-tokens", "448", "--seeds", "2")
DEPTHS = "0,.1,.2,.3,.4,.5,.6,.7,.8,.9,1"
PLACES = ("--dataset", "niah_places", "--kinds", "one,split,two-chunk", "--places", "start,middle,end", "--seed", "1")
VT = ("vt", "--form", "value", "--count", "6", "--model", "smollm2-135m")


@dataclass(frozen=True)
class Set:
    """One data file under the data folder, and how it is measured. `make`: the words of `eval generate` that make the
    file from the data folder first; it is then kept under benchmarks/made, outside of the repository."""

    name: str
    file: str
    limit: int | None
    methods: str
    generate: str
    make: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


SETS = (
    Set("2wikimqa", "2wikimqa/2wikimqa.chunks.jsonl", 55, CORE, WRITING),
    Set("hotpotqa", "hotpotqa/hotpotqa.chunks.jsonl", 55, CORE, WRITING),
    Set("musique", "musique/musique.chunks.jsonl", 55, CORE, WRITING),
    Set("ablations", "2wikimqa/2wikimqa.chunks.jsonl", 30, ABLATIONS, "none", options=("--kv-error",)),
    Set("no_head", "2wikimqa/2wikimqa.chunks.jsonl", 30, FEW, "none", options=("--head-policy", "none")),
    Set("fairytaleqa", "fairytaleqa/fairytaleqa.chunks.jsonl", 40, FEW, "all"),
    Set("nq_multidoc", "nq_multidoc/nq_multidoc.chunks.jsonl", 40, FEW, "all"),
    Set("product_docs", "product_docs/product_docs.chunks.jsonl", 43, FEW, "all"),
    Set("kv_retrieval", "kv_retrieval/kv-retrieval-75_keys.jsonl", 20, FEW, "all"),
    Set("vt", "vt.chunks.jsonl", 48, FEW, "all", VT),
    Set(
        "niah",
        "niah.chunks.jsonl",
        55,
        NEEDLES,
        "all",
        (*ESSAYS, "--lengths", "1000,2000,4000,6000,7500", "--depths", DEPTHS),
    ),
    Set(
        "niah_places",
        "niah_places.chunks.jsonl",
        35,
        NEEDLES,
        "all",
        (*ESSAYS, "--lengths", "2000", "--depths", ".1,.3,.5,.7,.9", *PLACES),
    ),
)


def made(s: Set, data: Path) -> Path:
    """The set's file, made where it is not there yet."""
    file = MADE / s.file
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        words = [str(data / word) if word == "needle/essays" else word for word in s.make]
        subprocess.run(
            [sys.executable, "-m", "infoflow_kv", "eval", "generate", *words, "--out", str(file)], check=True
        )
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("INFOFLOW_DATA"), help="folder of the data sets")
    parser.add_argument("--only", nargs="*", choices=[s.name for s in SETS], help="these sets only")
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, or set INFOFLOW_DATA to the folder of the data sets")
    for s in SETS:
        if args.only and s.name not in args.only:
            continue
        file = made(s, Path(args.data)) if s.make else Path(args.data) / s.file
        command = ["eval", "predict", "--data", str(file)]
        command += [] if s.limit is None else ["--limit", str(s.limit)]
        command += ["--methods", s.methods, "--generate", s.generate, *s.options, "--out", str(RESULTS / s.name)]
        print(f"{s.name}: {s.limit or 'all'} items", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "infoflow_kv", *command], check=True)


if __name__ == "__main__":
    main()
