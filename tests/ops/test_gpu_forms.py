"""The forms of staircase attention for GPUs, tested on a CPU: FlexAttention, and our Triton kernel interpreted."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from infoflow_kv.errors import OptionError
from infoflow_kv.ops import AttentionSpec, Staircase, flex, forms, staircase
from ops.gpu_cases import CASES, SCATTERED, SPARSE, Case
from reference.attention import attend
from tolerance import KERNEL, assert_close

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "benchmarks" / "gpu_attention.py"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (Linux only)")
by_case = pytest.mark.parametrize("name", CASES)


def log_sum_exp(query: torch.Tensor, keys: torch.Tensor, case: Case) -> torch.Tensor:
    """float64 LSE `[heads, rows]` without sinks, from all logits at once."""
    filled = int(case.ranks[-1]) + 1
    wide = keys[:, :filled].double().repeat_interleave(case.group, dim=0)
    logits = query.double() @ wide.transpose(1, 2) * case.spec.scale
    if case.softcap is not None:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    slots, ranks = torch.arange(filled)[None], case.ranks[:, None]
    hidden = (slots > ranks) | (slots <= ranks - (case.window or filled))
    return torch.logsumexp(logits.masked_fill(hidden, float("-inf")), dim=-1)


def check(out: torch.Tensor, lse: torch.Tensor | None, case: Case) -> None:
    query, keys, values = case.tensors()
    assert out.dtype == case.dtype
    filled = int(case.ranks[-1]) + 1
    expected = attend(query, keys[:, :filled], values[:, :filled], case.ranks, case.spec)
    assert_close(out.float(), expected, KERNEL[case.dtype])
    if lse is not None:
        assert_close(lse, log_sum_exp(query, keys, case), KERNEL[torch.float32])


# ---------------------------------------------------------------------------------------------------------------- flex


def by_flex(case: Case, backend: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    query, keys, values = case.tensors()
    steps = case.ranks.tolist()
    mask = flex.make_block_mask(case.ranks, steps, case.window)
    keys, values = keys[:, : steps[-1] + 1], values[:, : steps[-1] + 1]
    return flex.attend_by_flex(query, keys, values, mask, case.spec, wants_lse=backend == "eager", backend=backend)


@by_case
def test_flex_attention_is_causal_attention_by_rank(name):
    out, lse = by_flex(CASES[name], "eager")
    assert lse is not None
    check(out, lse, CASES[name])


@pytest.mark.skipif(not flex.has_compiler(), reason="no C++ compiler, with which torch compiles for the CPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own imports
def test_compiled_flex_attention_is_compiled_once_for_all_lengths_ranks_and_windows():
    counters.clear()
    several_blocks = torch.arange(0, 690, 3)
    for ranks, window in ((SCATTERED, 13), (SPARSE, 5), (several_blocks, 300), (torch.tensor([0, 99]), 50)):
        case = Case(ranks, window=window, softcap=2.0)
        check(*by_flex(case, None), case)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("window", [None, 1, 5, 13, 40, 200])
@pytest.mark.parametrize("name", ["scattered", "all", "tail", "sparse and prompt", "two rows"])
def test_block_masks_say_what_is_seen(name, window, monkeypatch):
    monkeypatch.setattr(flex, "BLOCK", 8)
    ranks = CASES[name].ranks
    mask = flex.make_block_mask(ranks, ranks.tolist(), window)
    assert mask.seq_lengths == (len(ranks), int(ranks[-1]) + 1)
    held = torch.zeros(len(ranks), 104, dtype=torch.int64)
    seen = staircase.visible(ranks, 0, 104, window)
    for kind, (counts, indices) in enumerate(
        [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)]
    ):
        assert counts.dtype == indices.dtype == torch.int32
        for block, count in enumerate(counts[0, 0].tolist()):
            for index in indices[0, 0, block, :count].tolist():
                part = slice(8 * block, 8 * block + 8), slice(8 * index, 8 * index + 8)
                assert not kind or bool(seen[part].all()), "a full block takes no mask"
                assert window is not None or bool(seen[part].any()), "nobody sees this block"
                held[part] += 1
    assert int(held.max()) == 1
    assert bool(held[seen].all())


# -------------------------------------------------------------------------------------------------------------- triton


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    path = tmp_path_factory.mktemp("triton") / "found.safetensors"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu_cases.py"), str(path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return load_file(path)


@needs_triton
@by_case
def test_the_triton_kernel_is_causal_attention_by_rank(name, interpreted):
    check(interpreted[f"{name}/out"], interpreted[f"{name}/lse"], CASES[name])


@needs_triton
def test_a_staircase_takes_the_triton_kernel_where_it_is_asked_for(interpreted):
    check(interpreted["picked"], None, CASES["everything"])


@needs_triton
def test_the_triton_kernel_compiles_for_gpus(tmp_path):
    """Triton's own compiler and NVIDIA's assembler need no GPU; blocks fit the shared memory of consumer cards too."""
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernel.py"), "80", "90"],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shared = [int(line) for line in done.stdout.split()]
    assert len(shared) == 6 and max(shared) <= 99 * 1024


# -------------------------------------------------------------------------------------------------------------- choice


@pytest.fixture
def environment(monkeypatch):
    def set_choice(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv(forms.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(forms.VARIABLE, value)
        forms.choice_of_environment.cache_clear()

    yield set_choice
    monkeypatch.undo()
    forms.choice_of_environment.cache_clear()


@pytest.mark.parametrize("form", ["flex", "blocks"])
def test_the_environment_names_the_form_and_it_is_read_once(form, environment, monkeypatch):
    environment(form)
    case = CASES["window"]
    stairs = Staircase(case.ranks)
    monkeypatch.setenv(forms.VARIABLE, "changed later")
    monkeypatch.setattr(flex, "has_compiler", lambda: False)
    taken = []
    for module, name in ((flex, "attend_by_flex"), (staircase, "in_blocks")):
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, name=name, right=right: taken.append(name) or right(*given))
    check(stairs.attend(*case.tensors(), case.spec), None, case)
    assert taken == [{"flex": "attend_by_flex", "blocks": "in_blocks"}[form]]


def test_the_environment_may_be_empty(environment):
    for value in (None, "", "auto"):
        environment(value)
        assert forms.choice_of_environment() == "auto"


def test_an_unknown_form_is_an_error_that_lists_the_known_ones(environment):
    environment("tritn")
    with pytest.raises(OptionError, match="'tritn'; did you mean 'triton'.*auto, blocks, flex, triton"):
        Staircase(SPARSE)
    with pytest.raises(OptionError, match="known: auto, blocks, flex, triton"):
        Staircase(SPARSE, form="cuda")


def test_a_form_that_cannot_be_had_is_an_error_with_the_reason(monkeypatch):
    case = CASES["window"]
    given = (*case.tensors(), case.spec)
    if find_spec("triton") is not None:
        with pytest.raises(OptionError, match="needs a CUDA device, not cpu"):
            Staircase(case.ranks, form="triton").attend(*given)
    monkeypatch.setattr(forms, "has_triton", lambda: False)
    with pytest.raises(OptionError, match="pip install 'infoflow-kv\\[triton\\]'"):
        Staircase(case.ranks, form="triton").attend(*given)


def test_the_first_form_of_the_device_that_can_is_taken(monkeypatch):
    query = torch.empty(2, 3, 16, device="meta")
    right = lambda form, query: True  # noqa: E731
    assert forms.pick("auto", torch.empty(2, 3, 16), right) is None
    assert forms.pick("auto", query, right) == "blocks"  # a device that is not in the table
    monkeypatch.setitem(forms.BY_DEVICE, "meta", ("triton", "flex", "blocks"))
    assert forms.pick("auto", query, right) == "blocks"
    monkeypatch.setitem(forms.MISSING, "flex", lambda query: None)
    assert forms.pick("auto", query, right) == "flex"
    monkeypatch.setitem(forms.MISSING, "triton", lambda query: None)
    assert forms.pick("auto", query, right) == "triton"
    # One that gives wrong numbers on a device is passed over.
    assert forms.pick("auto", query, lambda form, query: form != "triton") == "flex"
    assert forms.pick("auto", query, lambda form, query: False) == "blocks"


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (None, ""),
        (lambda given: torch.zeros_like(given[0]), "off by"),
        (lambda given: torch.full_like(given[0], float("nan")), "off by nan"),
        (lambda given: 1 / 0, "division by zero"),
    ],
)
def test_a_form_is_tried_before_it_is_trusted(broken, says, monkeypatch, caplog):
    monkeypatch.setattr(flex, "has_compiler", lambda: False)
    staircase._agrees.cache_clear()
    if broken is not None:
        monkeypatch.setattr(flex, "attend_by_flex", lambda *given: (broken(given), None))
    try:
        assert staircase.is_right("flex", torch.empty(4, 9, 16)) is (broken is None)
        told = " ".join(r.getMessage() for r in caplog.records if r.name.startswith("infoflow_kv"))
        assert says in told and bool(told) is (broken is not None)
    finally:
        staircase._agrees.cache_clear()


def test_a_staircase_makes_its_block_mask_once_for_all_layers(monkeypatch):
    made = []
    right = flex.make_block_mask
    monkeypatch.setattr(flex, "make_block_mask", lambda *given: made.append(given[2]) or right(*given))
    monkeypatch.setattr(flex, "has_compiler", lambda: False)
    stairs = Staircase(SPARSE, form="flex")
    for window in (None, 13, None, 13, 1000):  # 1000: wider than all slots, so none
        case = Case(SPARSE, window=window)
        check(stairs.attend(*case.tensors(), case.spec), None, case)
    assert made == [None, 13]


def test_one_row_needs_no_form(monkeypatch):
    monkeypatch.setattr(flex, "attend_by_flex", lambda *given: pytest.fail("one row has no stairs"))
    case = Case(torch.tensor([60]))
    check(Staircase(case.ranks, form="flex").attend(*case.tensors(), AttentionSpec(0.3)), None, case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and the script would measure it")
@pytest.mark.skipif(not SCRIPT.exists(), reason="the benchmarks are in the repository only")
def test_the_measurements_say_where_there_is_no_gpu():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr and not done.stdout
