"""How quick it is, on this machine: each question a function that returns plain records. Nothing here prints.

`timing` (interleaved arms) and `ceilings` (bare products and copies) measure, `work` counts what a request must do at
least; `ttft`, `attention`, `ingest`, `decode`, `memory` and `compare` ask.
"""
