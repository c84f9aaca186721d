"""One request over several processes, each with a part of the documents; rank 0 prints the answer.

torchrun --nproc-per-node 2 examples/several_ranks.py
"""

import sys

import infoflow_kv as ifk

DOCUMENTS = [
    "Ada Brand has kept the lighthouse of Saltmere since the winter of the long storm.",
    "The harbour of Saltmere closes at nine. The boats come home at six and are counted twice.",
]


def main(model_name: str = "smollm2-135m") -> str:
    # All ranks make the same calls with the same arguments. A rank that is lost ends the others with a ParallelError.
    # gloo is for models on CPUs. With a GPU for each rank leave it out, and load to f"cuda:{group.local_rank}".
    with ifk.Group.join(timeout_seconds=120, backend="gloo") as group:
        engine = ifk.Engine(ifk.load(model_name), store=ifk.MemoryStore(), group=group)
        answer = engine.answer("Who keeps the lighthouse of Saltmere?", DOCUMENTS, max_new_tokens=24)
        if group.rank == 0:
            layout = engine.place.layout.name
            print(f"{group.size} ranks, layout {layout}, {answer.usage.recomputed_tokens} tokens recomputed")
            print(answer.text)
    return answer.text


if __name__ == "__main__":
    main(*sys.argv[1:])
