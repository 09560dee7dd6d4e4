"""The public names are those of the contract, and documented."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

import prong


def test_all_is_sorted_and_importable():
    assert sorted(prong.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n)) == list(prong.__all__)
    assert all(hasattr(prong, name) for name in prong.__all__)


SIGNATURES = {
    prong.PRONG: ["momentum", "nesterov", "weight_decay", "damping", "form", "refresh", "others", "params"],
    prong.AdamW: ["betas", "eps", "weight_decay", "damping", "form", "refresh", "params"],
    prong.Muon: ["momentum", "weight_decay", "damping", "form", "refresh", "space", "others"],
}


@pytest.mark.parametrize("optimizer", SIGNATURES, ids=lambda optimizer: optimizer.__name__)
def test_optimizers_take_the_model_and_the_rate_and_everything_else_by_name(optimizer):
    parameters = list(inspect.signature(optimizer).parameters.values())
    assert [p.name for p in parameters] == ["model", "lr", *SIGNATURES[optimizer], "options"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[2:-1])


def test_attach_takes_the_model_and_the_optimizer_and_everything_else_by_name():
    parameters = list(inspect.signature(prong.attach).parameters.values())
    assert [p.name for p in parameters[:5]] == ["model", "optimizer", "damping", "form", "refresh"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[2:])


def test_options_are_values_that_print_what_they_are_made_of():
    options = [prong.Absolute(1.0), prong.Auto(), prong.Every(3), prong.Explicit(), prong.Implicit()]
    for option in [*options, prong.Materialised(), prong.Never(), prong.OnDrift(), prong.WhitenOutputs()]:
        with pytest.raises(FrozenInstanceError):
            option.anything = 1
        assert eval(repr(option), vars(prong)) == option


def test_every_public_name_says_what_it_is():
    assert all(inspect.getdoc(getattr(prong, name)) for name in prong.__all__)


def test_the_library_needs_torch_alone_and_nothing_of_the_lab():
    """In a fresh process, importing prong imports no lab module and none of the lab's libraries."""
    code = (
        "import sys, prong, pathlib, importlib\n"
        "root = pathlib.Path(prong.__file__).parent\n"
        "for file in root.rglob('*.py'):\n"
        "    parts = file.relative_to(root).with_suffix('').parts\n"
        "    if parts[0] not in ('lab', 'integrations', '__init__'):\n"
        "        importlib.import_module('.'.join(('prong', *parts)))\n"
        "bad = {'rich', 'tyro', 'matplotlib', 'mlxtend', 'prong.lab'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert any(m.name == "prong.lab" for m in pkgutil.iter_modules(prong.__path__, "prong."))


def test_analyses_and_integrations_are_imported_when_they_are_asked_for():
    code = (
        "import sys, prong\n"
        "early = {m for m in sys.modules if m.startswith(('prong.analysis', 'prong.integrations'))}\n"
        "prong.fisher, prong.monitor, prong.mirror, prong.spectral, prong.accuracy\n"
        "sys.exit(f'imported {early}' if early else 'prong.analysis.fisher' not in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with pytest.raises(AttributeError, match="no attribute 'integrals'"):
        _ = prong.integrals
