"""Here no number may hang on a clock: rows take the CPU form of the rule unless a test asks for another."""

import pytest

from infoflow_kv.ops import staircase


@pytest.fixture(autouse=True)
def no_trial_of_cpu_forms(monkeypatch):
    monkeypatch.setattr(staircase, "cpu_choice_of_environment", lambda: "rule")
