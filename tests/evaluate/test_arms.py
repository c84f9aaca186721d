"""Arms: what is understood, how each is named, what it becomes on a model."""

import pytest

import tiny
from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate.arms import check_distinct, parse_arms, parse_budget, split_outside_brackets
from infoflow_kv.evaluate.findings import variant
from infoflow_kv.models import wrap


@pytest.fixture(scope="module")
def model():
    return wrap(tiny.hf_model("llama"), tiny.tokenizer(), "tiny")


def names(methods: str, budgets=(0.05, 0.15), **shared) -> list[str]:
    return [arm.name for arm in parse_arms(methods, budgets, **shared)]


class TestNames:
    def test_each_method_at_every_budget_unless_it_names_one_or_has_none(self):
        assert names("full, none,epic,cacheblend@0.3") == ["full", "none", "epic@0.05", "epic@0.15", "cacheblend@0.3"]
        assert names("first-k:32,seam") == ["first-k:32", "seam"]
        assert names("infoflow@auto:0.7,infoflow@auto") == ["infoflow@auto:0.7", "infoflow@auto:0.8"]

    def test_the_same_arm_has_the_same_name_however_it_is_written(self):
        assert (
            names("infoflow[ reorder , geometry=hl-tp, layers=all ]@.15")
            == names("infoflow[layers=all,geometry=HL-TP,reorder=true]@0.150")
            == ["infoflow[reorder,layers=all,geometry=HL-TP]@0.15"]
        )

    def test_defaults_stand_in_no_name(self):
        plain = "infoflow[geometry=GLOBAL,layers=auto,reorder=false,chunk_floor=0,chunk_cap=1,repair_layers=all]@.15"
        assert names(plain) == ["infoflow@0.15"]
        with pytest.raises(OptionError, match=r"'infoflow@0\.15' comes twice"):
            names(plain + ",infoflow@0.15")

    def test_names_of_budgets_are_exact(self):
        """The name is what a resumed run finds its rows by: 0.1500004 is no 0.15."""
        assert names("epic@0.1500004,epic@0.15") == ["epic@0.1500004", "epic@0.15"]
        assert names("epic@auto:0.70000001,epic@auto:0.7") == ["epic@auto:0.70000001", "epic@auto:0.7"]
        assert names("epic@1,epic@0.0,epic@.5e-1") == ["epic@1", "epic@0", "epic@0.05"]

    @pytest.mark.parametrize(
        "methods",
        [
            "infoflow@auto,infoflow@auto:0.8",
            "infoflow@auto:0.80,infoflow@auto:.8",
            "infoflow@-0,infoflow@0",
            "infoflow[budget_max=0.3]@auto,infoflow@auto:0.8",
            "infoflow[chunk_floor=-0.0]@.15,infoflow@.15",
            "first-k:016,first-k:16",
            "first-k,first-k:16",
            "seam:16,seam",
            "infoflow[layers=3-5]@.1,infoflow[layers=5,4,03]@.1",
            "infoflow[repair_layers=0-3]@.1,infoflow[repair_layers=0,1,2,3]@.1",
        ],
    )
    def test_one_arm_written_in_two_ways_comes_twice(self, methods):
        with pytest.raises(OptionError, match="comes twice"):
            names(methods, (0.15,))

    def test_a_list_in_brackets_is_one_value(self):
        [arm] = parse_arms("infoflow[layers=3,7,9-11,reorder]@0.15", ())
        assert arm.options == {"layers": "3,7,9-11", "reorder": True}
        # The report reads names: neither difference may swallow the other.
        assert variant(arm.name) == {"layers": "3,7,9-11", "reorder": ""}

    def test_lists_are_cut_outside_brackets_only(self):
        assert split_outside_brackets("a[x=1,y=2],b,,c") == ["a[x=1,y=2]", "b", "c"]


class TestShared:
    def test_geometry_goes_to_arms_that_score_by_attention_and_name_none(self):
        found = names(
            "full,none,random,epic,cacheblend,a3,infoflow,infoflow[geometry=TL-TP]", (0.15,), geometry="HL-TP"
        )
        assert found == [
            "full", "none", "random@0.15", "epic@0.15", "cacheblend@0.15", "a3[geometry=HL-TP]@0.15",
            "infoflow[geometry=HL-TP]@0.15", "infoflow[geometry=TL-TP]@0.15",
        ]  # fmt: skip
        assert names("infoflow[geometry=GLOBAL]", (0.15,), geometry="HL-TP") == ["infoflow@0.15"]

    def test_reorder_goes_to_arms_that_score_tokens_and_name_none(self):
        found = names("full,none,cacheblend,epic,oracle,infoflow,infoflow[reorder=false]", (0.15,), reorder=True)
        assert found == [
            "full", "none", "cacheblend@0.15", "epic[reorder]@0.15", "oracle@0.15", "infoflow[reorder]@0.15",
            "infoflow@0.15",
        ]  # fmt: skip


class TestRecipes:
    def test_an_arm_becomes_what_its_name_says(self, model):
        [arm] = parse_arms("infoflow[layers=1,3,geometry=HL-HP,reorder,chunk_floor=0.2,chunk_cap=0.5]@0.3", ())
        recipe = arm.recipe(model)
        assert (recipe.layers, recipe.geometry, recipe.reorder) == ((1, 3), "HL-HP", True)
        assert (recipe.allocation.floor, recipe.allocation.cap, recipe.budget.share) == (0.2, 0.5, 0.3)
        [arm] = parse_arms("infoflow[budget_max=0.2,repair_layers=0-1]@auto:0.7", ())
        recipe = arm.recipe(model)
        assert (recipe.budget.share, recipe.budget.cover, recipe.repair_layers) == (0.2, 0.7, (0, 1))

    def test_arms_that_are_the_same_on_this_model(self, model):
        """What only the model tells: it has 4 layers, and `relative` of them is layer 2."""
        methods = "infoflow,infoflow[layers=all],infoflow[layers=0],prophetkv,epic"
        check_distinct(parse_arms(methods, (0.15, 0.3)), model)
        for methods in (
            "infoflow[layers=all],infoflow[layers=0-3]",
            "infoflow,infoflow[layers=relative]",
            "infoflow[repair_layers=0-3],infoflow",
        ):
            with pytest.raises(OptionError, match=r"arms 'inf.* and 'inf.* are the same on tiny .* leave one out"):
                check_distinct(parse_arms(methods, (0.15,)), model)

    def test_layers_that_the_model_has_not(self, model):
        [arm] = parse_arms("infoflow[layers=22-25]@0.15", ())
        with pytest.raises(OptionError, match="outside the model's 0-3"):
            arm.recipe(model)


@pytest.mark.parametrize(
    ("methods", "budgets", "words"),
    [
        ("infoflw", (0.15,), "unknown method 'infoflw'; did you mean 'infoflow'"),
        ("", (0.15,), "no arm was given"),
        (" , ", (0.15,), "no arm was given"),
        ("infoflow", (), "needs a budget; give --budget or write infoflow@0.15"),
        ("infoflow@1.5", (), "1.5 is outside 0..1"),
        ("infoflow@nan", (), "outside 0..1"),
        ("infoflow@lots", (), "'lots' is neither a number in 0..1 nor auto"),
        ("infoflow@auto:2", (), "'auto:2' is not understood"),
        ("infoflow[layers=all", (0.15,), "'infoflow.layers=all' is not understood"),
        ("infoflow]@0.15", (0.15,), "is not understood"),
        ("infoflow@0.1@0.2", (0.15,), "is not understood"),
        ("infoflow[layer=3]", (0.15,), "unknown difference 'layer'; did you mean 'layers'"),
        ("infoflow[all]", (0.15,), "'all' is not understood; write name=value"),
        ("infoflow[reorder=maybe]", (0.15,), "reorder is 'maybe'; expected true or false"),
        ("infoflow[chunk_cap=much]", (0.15,), "chunk_cap is 'much'; expected a number"),
        ("infoflow[geometry=LOCAL]", (0.15,), "unknown geometry 'LOCAL'"),
        ("infoflow[layers=1,layers=2]", (0.15,), "layers comes twice"),
        ("full@0.15", (0.15,), "full takes no budget"),
        ("first-k:16@0.15", (0.15,), "first-k takes no budget"),
        ("oracle[reorder]", (0.15,), "oracle knows the full prefill of the given order only"),
        ("full,none,full", (0.15,), "'full' comes twice"),
        ("none[layers=all]", (0.15,), "none does not read layers, .*it reads tiles"),
        ("full[reorder]", (0.15,), "full does not read reorder"),
        ("none[geometry=HL-TP]", (0.15,), "none does not read geometry"),
        ("epic[geometry=HL-TP]", (0.15,), "epic does not read geometry, .*it reads reorder, repair_layers"),
        ("random[layers=all]", (0.15,), "random does not read layers"),
        ("a3[layers=all]", (0.15,), "a3 does not read layers"),
        ("cacheblend[repair_layers=0-1]", (0.15,), "cacheblend does not read repair_layers"),
        ("cacheblend[reorder]", (0.15,), "cacheblend does not read reorder"),
        ("first-k[budget_max=0.1]", (0.15,), "first-k does not read budget_max"),
        ("infoflow[budget_max=0.1]@.15", (), "budget_max is the ceiling of adaptive budgets"),
        ("infoflow[budget_max=0.1]", (0.15, "auto:0.8"), "budget_max is the ceiling of adaptive budgets"),
        ("infoflow", (0.15, 0.15), "'infoflow@0.15' comes twice"),
    ],
)
def test_what_is_not_understood(methods, budgets, words):
    with pytest.raises(OptionError, match=words):
        parse_arms(methods, budgets)


def test_budgets():
    assert [parse_budget(text) for text in (" .05", "1", "0", "auto", "auto:0.7")] == [
        0.05,
        1.0,
        0.0,
        "auto:0.8",
        "auto:0.7",
    ]
    for text in ("automatic", "-0.1", "inf", ""):
        with pytest.raises(OptionError):
            parse_budget(text)
