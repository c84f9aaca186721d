"""Phase by phase with a selector of your own: recompute what stands at the end of each chunk.

python examples/own_selector.py
"""

import torch

import infoflow_kv as ifk


class ChunkEnds:
    """Higher scores towards the end of each chunk; a selector has just this one method."""

    def score(self, scene):
        scores = torch.zeros(scene.context.num_tokens)
        for span in scene.context.spans:
            scores[span.start : span.stop] = torch.linspace(0, 1, span.num_tokens)
        return scores


def main(model_name: str = "smollm2-135m") -> str:
    model = ifk.load(model_name)
    engine = ifk.Engine(model)
    documents = ["Ada keeps the lighthouse of Saltmere.", "The lighthouse of Saltmere was built in 1871 of grey stone."]
    prompt = engine.prompt("When was the lighthouse built?", documents)
    head = ifk.prefill(model, engine.identify_head())
    parts = [head] + [ifk.prefill(model, engine.identify(chunk), head) for chunk in prompt.chunks]
    rotary = model.rotary()
    tables = rotary.tables(torch.arange(prompt.num_tokens))
    exact = parts[0].num_tokens + parts[1].num_tokens  # the head and the chunk right behind it
    context = ifk.assemble(model, parts, tables, prompt.num_tokens + 20, exact)
    suffix = torch.tensor(prompt.suffix_ids)
    scores = ChunkEnds().score(ifk.Scene(model, context, suffix, tables))
    selection = ifk.take(scores, 0.15, context)
    logits = ifk.repair(model, context, selection, suffix, tables)
    tokens = ifk.decode(model, context, rotary, prompt.num_tokens, logits[-1], ifk.sampler(ifk.Sampling()), 20)
    return model.text(list(tokens))


if __name__ == "__main__":
    print(main())
