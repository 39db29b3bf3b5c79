"""Facts about a module's tensors, and its modes: what is trained, what is frozen, what layers share.

Tensors of a model are of three kinds. *Trained* parameters have ``requires_grad``; clients train and send them.
*Frozen* tensors are the other parameters, and the buffers of layers all of whose parameters are frozen; they are the
same for everybody and do not travel. *Buffers of layers that train, also in part*, such as a batch norm's running
statistics, are sent, and aggregated as parameters are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.registry import import_path


def module_at(path: str, arguments: dict[str, Any], field: str, field_of_arguments: str) -> nn.Module:
    """Import the class ``package.module:Class`` and call it with the arguments; the fields are for messages."""
    cls = import_path(path, field)
    # Before the call: an experiment names the path and the arguments, and a call of anything else may do anything.
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise FedblendError(f"{field}: '{path}' is a {type(cls).__name__}; it must be a subclass of torch's nn.Module")
    try:
        return cls(**arguments)
    except TypeError as error:
        raise FedblendError(f"{field_of_arguments}: {arguments!r} do not fit {path}: {error}") from None


def same_tensors(model: nn.Module) -> dict[str, str]:
    """Further names of tensors that layers share, each with the tensor's first name; empty if no layers do."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()}
    return {name: other for name, other in names.items() if other != name}


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names of parameters that are not trained, and of buffers whose innermost layer with parameters has only such.

    >>> model = nn.Sequential(nn.BatchNorm1d(2).requires_grad_(False), nn.BatchNorm1d(2))
    >>> sorted(frozen_names(model))
    ['0.bias', '0.num_batches_tracked', '0.running_mean', '0.running_var', '0.weight']
    """
    frozen: set[str] = set()
    is_frozen: dict[str, bool] = {}  # by path of each layer with parameters
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            frozen.add(name)
        for path in _around(name):
            is_frozen[path] = is_frozen.get(path, True) and not parameter.requires_grad
    for name, _ in model.named_buffers(remove_duplicate=False):
        if next((is_frozen[path] for path in _around(name) if path in is_frozen), False):
            frozen.add(name)
    return frozenset(frozen)


def _around(name: str) -> Iterator[str]:
    """Paths of the layers around a tensor, from the innermost to the model itself."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def still_layers(model: nn.Module) -> list[nn.Module]:
    """Layers with frozen floating-point buffers, such as a frozen batch norm, which stay in evaluation mode."""
    frozen = frozen_names(model)
    return [
        layer
        for path, layer in model.named_modules()
        for name, buffer in layer.named_buffers(recurse=False)
        if buffer.is_floating_point() and f"{path}.{name}".lstrip(".") in frozen
    ]


def train_mode(model: nn.Module) -> nn.Module:
    """Set training mode, but for :func:`still_layers`."""
    model.train()
    for layer in still_layers(model):
        layer.training = False
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the model is in evaluation mode; then each layer has the mode that it had."""
    modes = [(layer, layer.training) for layer in model.modules()]
    try:
        model.eval()
        yield model
    finally:
        for layer, mode in modes:
            layer.training = mode
