"""Prompts of other evaluations: one template for each data set, in LongBench's form (`dataset2prompt.json`)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from infoflow_kv.errors import DocumentError, OptionError, unknown_name
from infoflow_kv.evaluate.items import Item, Passage
from infoflow_kv.evaluate.json_text import cleaned, parsed

CONTEXT, QUESTION = "{context}", "{input}"


def read_prompts(path: str | Path) -> dict[str, str]:
    """Return the templates of a JSON object {data set: template}, as LongBench's `dataset2prompt.json` is one.

    Lone surrogates are replaced, as in data files. DocumentError for a file that is none. Templates are checked when
    they are used: the official file holds some that have no question, and those of tasks without documents.
    """
    path = Path(path)
    try:
        given = parsed(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DocumentError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DocumentError(f"'{path}' is not JSON ({error}); give an object of data sets and templates") from None
    if not isinstance(given, dict) or not given or not all(isinstance(text, str) for text in given.values()):
        raise DocumentError(
            f'\'{path}\' holds no templates; expected an object like {{"hotpotqa": "… {CONTEXT} … {QUESTION} …"}}'
        )
    return {cleaned(name): cleaned(text) for name, text in given.items()}


def check_prompt(dataset: str, prompts: Mapping[str, str]) -> str:
    """The data set's template; OptionError where there is none, or one whose documents nothing could reuse."""
    if dataset not in prompts:
        raise unknown_name("data set in the prompts", dataset, prompts)
    template = prompts[dataset]
    if template.count(CONTEXT) != 1 or template.count(QUESTION) != 1:
        raise OptionError(
            f"the prompt of '{dataset}' has {CONTEXT} {template.count(CONTEXT)} times and {QUESTION} "
            f"{template.count(QUESTION)} times; each is needed once"
        )
    if template.index(QUESTION) < template.index(CONTEXT):
        raise OptionError(
            f"the prompt of '{dataset}' puts the question before the documents; chunks are stored without a question, "
            f"so write {QUESTION} behind {CONTEXT}"
        )
    return template


def worded(item: Item, prompts: Mapping[str, str]) -> Item:
    """The item in the words of its data set's template: what stands before the documents is its instruction, all that
    stands behind them its question, and passages with a title are numbered as LongBench numbers them.

    The chat scaffold around them, and a blank line where LongBench has one newline between passages, stay ours: chunks
    must be the same wherever they stand. The engine adds no label to the question. Raises OptionError as
    `check_prompt`.

    >>> item = Item("i", "boats", "Who?", ("Ann",), (Passage("Log", "Ann sails."),))
    >>> worded(item, {"boats": "Read.\\n{context}\\n\\nAnswer: {input}"}).passages[0].text
    'Passage 1:\\nLog\\nAnn sails.'
    """
    before, _, behind = check_prompt(item.dataset, prompts).partition(CONTEXT)
    passages = tuple(
        Passage("", f"Passage {number}:\n{p.title}\n{p.text}") if p.title else p
        for number, p in enumerate(item.passages, start=1)
    )
    question = behind.strip().replace(QUESTION, item.question)
    return replace(item, instruction=before.strip(), question=question, passages=passages)
