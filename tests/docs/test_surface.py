"""The public surface: sorted names that import, nothing heavy before it is asked for."""

import subprocess
import sys

import infoflow_kv


def test_all_names_are_sorted_and_there():
    order = sorted(infoflow_kv.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert infoflow_kv.__all__ == order
    for name in infoflow_kv.__all__:
        assert getattr(infoflow_kv, name) is not None
    assert set(infoflow_kv._HOMES) == set(infoflow_kv.__all__)


def test_phase_functions_are_functions_whatever_was_imported_first():
    names = "[n for n in i.__all__ if n != 'METHODS']"
    code = f"import infoflow_kv.engine, infoflow_kv as i; assert all(callable(getattr(i, n)) for n in {names})"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = "import infoflow_kv, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
