"""Documents of about N tokens: the same for a seed, never over, cut at a word, no chunk twice."""

from dataclasses import replace

import pytest

from infoflow_kv.benchmark.context import Setting
from infoflow_kv.errors import OptionError, PromptTooLongError
from infoflow_kv.records import Document


@pytest.mark.parametrize("tokens", [40, 200, 700])
def test_the_length_is_met_from_below(setting: Setting, tokens: int) -> None:
    chunks = setting.request(tokens).prompt.chunks
    assert tokens - 24 <= sum(chunk.num_tokens for chunk in chunks) <= tokens
    assert len({chunk.token_ids for chunk in chunks}) == len(chunks)


def test_ids_are_fixed_by_the_seed(setting: Setting) -> None:
    first, again = setting.request(700), setting.request(700)
    assert first.token_ids_sha256 == again.token_ids_sha256
    assert replace(setting, seed=3).request(700).token_ids_sha256 != first.token_ids_sha256


def test_one_long_document_is_cut_at_a_word(setting: Setting) -> None:
    long = replace(setting, documents=(Document(text=" ".join(["lighthouse keeper"] * 300)),))
    [document] = long.request(100).documents
    assert set(document.text.split(" ")) == {"lighthouse", "keeper"}


def test_what_does_not_fit_is_refused(setting: Setting) -> None:
    with pytest.raises(OptionError, match="at least 16"):
        setting.request(5)
    with pytest.raises(PromptTooLongError, match="window of 2048"):
        setting.request(2040)
