"""Models to plan for, by name; on the meta device, where they take no memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prong.lab import models

TOKENS = 64  # per example of a transformer, unless its name says otherwise
HEAD = 64  # the width of one of its heads
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
KNOWN: Mapping[str, tuple[str, tuple[int, ...]]] = {  # where they are, and the shape of an example
    "autoencoder": ("prong.lab.models:autoencoder", (models.WIDTHS[0],)),
    "cifar10": ("prong.lab.models:cifar10_net", (3, models.CROP, models.CROP)),
    "inception": ("prong.lab.inception:inception", (3, 224, 224)),
}


@dataclass(frozen=True)
class Subject:
    """A model to plan for.

    Attributes:
        name: as it was asked for.
        make: builds the model, on whatever device is torch's default then.
        example: the shape of one example.
        integers: the dtype of examples that are not of floating-point numbers.
    """

    name: str
    make: Callable[[], nn.Module]
    example: tuple[int, ...]
    integers: torch.dtype | None = None

    def on_meta(self, dtype: torch.dtype) -> nn.Module:
        """The model without its numbers."""
        with torch.device("meta"):
            return self.make().to(dtype)

    def inputs(self, examples: int, dtype: torch.dtype, device: str = "meta") -> Tensor:
        """A minibatch without meaning."""
        return torch.empty(examples, *self.example, dtype=self.integers or dtype, device=device)


def subject(name: str, option: str = "model") -> Subject:
    """The model of that name, or one line that says which there are, to who gave it by an option."""
    if name in KNOWN:
        (module, _, function), example = KNOWN[name][0].partition(":"), KNOWN[name][1]
        return Subject(name, lambda: getattr(import_module(module), function)(), example)
    if sized := re.fullmatch(r"(mlp|transformer):(\d+)x(\d+)(?:x(\d+))?", name):
        kind, (width, depth, tokens) = sized[1], (int(number or TOKENS) for number in sized.groups()[1:])
        if min(width, depth, tokens) < 1 or (kind == "mlp" and sized[4]):
            raise SystemExit(f"--{option} {name}: widths and depths are at least 1; only transformers have tokens")
        if kind == "mlp":
            return Subject(name, lambda: models.mlp(width, depth), (width,))
        return Subject(name, lambda: _transformer(width, depth), (tokens, width))
    if ":" in name and not name.startswith(("mlp:", "transformer:")):
        return _named(name, option)
    raise SystemExit(
        f"--{option} knows no {name!r}. Choose from: {'; '.join(KNOWN)}; mlp:WIDTHxDEPTH; "
        "transformer:WIDTHxDEPTH or transformer:WIDTHxDEPTHxTOKENS; or module:function of your own, "
        "which returns a model and one example, or the shape of one"
    )


def _transformer(width: int, depth: int) -> nn.Module:
    heads = max(1, width // HEAD)
    while width % heads:
        heads -= 1
    return nn.Sequential(*(models.transformer_block(width, heads, 4 * width) for _ in range(depth)))


def _named(name: str, option: str) -> Subject:
    """A function of the user's: `module:function`, called without arguments, gives (model, an example or its shape)."""
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` would have it
        sys.path.insert(0, here)
    try:
        made: Any = getattr(import_module(module), function)
        with torch.device("meta"):
            model, example = made()
        shape = tuple(int(n) for n in (example.shape if isinstance(example, Tensor) else example))
    except Exception as error:  # of code that is the user's
        raise SystemExit(
            f"--{option} {name}: {error}. It is to name a function without arguments that returns a model and one "
            "example, or the shape of one, such as (3, 224, 224)."
        ) from error
    if not isinstance(model, nn.Module):
        raise SystemExit(f"--{option} {name}: the first it returns is a {type(model).__name__}, not a torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise SystemExit(f"--{option} {name}: the model has no parameters to train")
    integers = example.dtype if isinstance(example, Tensor) and not example.is_floating_point() else None
    return Subject(name, lambda: made()[0], shape, integers)
