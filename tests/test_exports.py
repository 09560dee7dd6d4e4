"""The public names are those of the contract, and documented."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys

import prong


def test_all_is_sorted_and_importable():
    assert sorted(prong.__all__, key=lambda n: (not n[0].isupper(), n)) == list(prong.__all__)
    assert all(hasattr(prong, name) for name in prong.__all__)


def test_the_contract_is_there():
    assert {"PRONG", "whiten_", "refresh_", "initialize_", "fold_", "summary"} <= set(prong.__all__)
    names = list(inspect.signature(prong.PRONG.__init__).parameters)
    assert names[1:4] == ["model", "lr", "momentum"]
    assert {"nesterov", "weight_decay", "eps", "period", "samples", "form"} <= set(names)


def test_every_public_name_says_what_it_is():
    assert all(inspect.getdoc(getattr(prong, name)) for name in prong.__all__)


def test_the_library_needs_torch_alone_and_nothing_of_the_lab():
    """In a fresh process, importing prong imports no lab module and none of the lab's libraries."""
    code = (
        "import sys, prong, pkgutil, importlib\n"
        "for m in pkgutil.iter_modules(prong.__path__, 'prong.'):\n"
        "    if m.name != 'prong.lab': importlib.import_module(m.name)\n"
        "bad = {'rich', 'tyro', 'matplotlib', 'mlxtend', 'prong.lab'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert any(m.name == "prong.lab" for m in pkgutil.iter_modules(prong.__path__, "prong."))
