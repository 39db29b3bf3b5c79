"""The setup of a run from its experiment: load and partition the data, fit the scale, build the model."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedblend.core.context import Task
from fedblend.core.dataset import Dataset, Population, Samples
from fedblend.core.errors import FedblendError, listed, require_memory, tokens_refused
from fedblend.core.module import evaluating, frozen_names
from fedblend.core.objective import with_bases
from fedblend.core.random import lent_generator, stream
from fedblend.core.setup import Setup
from fedblend.data.partitions.prepare import prepare
from fedblend.data.scale import Fitted
from fedblend.experiment.config import Experiment

FLOATS = (torch.float32, torch.float64, torch.float16)
"""Types of the numbers that clients train and send. Those of one byte, and bfloat16, lose most of a small step."""

FACTOR = re.compile(r"lora_(?:embedding_)?([ab])(?![a-z])", re.IGNORECASE)
"""A factor of a low-rank adapter in a tensor's name, as peft and others name it."""

ROWS = 1024
"""Samples that are looked at together, so that the training half is not copied."""


def make_setup(experiment: Experiment, data: Dataset | None = None, at_site: bool = False) -> Setup:
    """Load the data (unless given), partition them, fit the scale and build the model with its initial weights.

    ``at_site`` the model is tried on zeros: the server, which chooses it, is told of a failure.
    """
    data = data or experiment.data.load()
    if experiment.eval_samples is not None and not at_site:
        data = replace(data, test=_part_of(data.test, experiment.eval_samples))
    _require_pictures(experiment, data)
    population = split(experiment, data)
    scale = experiment.scale.fit(data)
    task = Task(data.task, data.outputs)
    experiment.method.upload.require_possible(task)
    sample = scale(data.train.x[:1])
    require_model_memory(experiment, tuple(sample.shape[1:]), task.outputs)
    with lent_generator(experiment.seed, "model"):
        model = experiment.model.build(tuple(sample.shape[1:]), task.outputs)
    _require_types(model, experiment.model.name)
    hint = "" if at_site else _hint_of_ids(data, experiment)
    _require_fit(model, torch.zeros_like(sample) if at_site else sample, task, experiment, hint)
    if data.kind == "tokens" if at_site else hint and _reads_ids(model, data, scale, experiment, hint):
        method = experiment.method
        for one in (method.sharing, *with_bases(method.objective), method.server_step):
            if one.numeric_inputs:
                raise tokens_refused(f"method.{one.kind}: '{one.name}'")
    if features := experiment.method.upload.features(model, sample):
        task = replace(task, features=features)
    setup = Setup(experiment, data, population, scale, model, task)
    _warn_of_noisy_variances(setup)
    if not at_site:
        _warn_of_factors(setup)
    return setup


def _part_of(test: Samples, number: int) -> Samples:
    """A fixed part of test samples, in their order, drawn without replacement whatever the run's seed."""
    if number > len(test):
        raise FedblendError(f"eval_samples: {number}: the data have {len(test)} test samples; valid: 1 to {len(test)}")
    rows = np.sort(stream(0, "eval_samples").permutation(len(test))[:number])
    return Samples(test.x[rows], test.y[rows], None if test.client is None else test.client[rows])


def split(experiment: Experiment, data: Dataset) -> Population:
    """Divide the training half of ``data`` among the experiment's clients."""
    e, kept = experiment, experiment.validation
    arrives = e.arrival is not None
    return prepare(e.partition, data, e.seed, e.fraction, e.holdout, kept.clients, kept.server, arrives)


def require_model_memory(experiment: Experiment, shape: tuple[int, ...], outputs: int) -> None:
    """Raise :class:`FedblendError` for a model of :mod:`fedblend.models` that is larger than the memory, unbuilt.

    A network on PyTorch's device "meta" has shapes and no numbers. A network of the user's own is built once: it may
    load a file.
    """
    if not type(experiment.model).__module__.startswith("fedblend.models."):
        return
    try:
        with lent_generator(experiment.seed, "model"), torch.device("meta"):
            model = experiment.model.build(shape, outputs)
            needed = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    except (RuntimeError, OverflowError) as error:
        if any(words in str(error) for words in ("overflow", "storage size", "too large", "int64")):
            raise FedblendError(f"model: {experiment.model.name} is too large ({error}); take a smaller one") from None
        return
    require_memory(needed, f"model: {experiment.model.name}", "take a smaller one")


def _require_pictures(experiment: Experiment, data: Dataset) -> None:
    shape = tuple(data.train.x.shape[1:])
    for one in experiment.train.augment:
        if data.kind != "image" or len(shape) != 3:
            why = f"needs pictures, but '{data.name}' holds {data.kind} of shape {list(shape)}"
            raise FedblendError(f"train.augment: '{one.name}' {why}; valid: no augmentation")
        one.require_possible(shape)


def _warn_of_noisy_variances(setup: Setup) -> None:
    """Warn where noise falls on running variances, which it can make negative."""
    experiment = setup.experiment
    if not getattr(experiment.protection, "size", 0.0) or not experiment.method.upload.is_model:
        return
    if variances := [name for name in setup.shared(setup.model.state_dict()) if name.endswith("running_var")]:
        told = f"batch norm's running statistics ({listed(variances)}, and their means) are clipped and noised"
        why = "a variance that noise makes negative counts as 0, and outputs are then hundreds of times too large"
        better = "group norm, or fedbn, whose batch norms stay at the clients"
        warnings.warn(f"protection: {told} with the weights; {why}; better: {better}", stacklevel=3)


def _warn_of_factors(setup: Setup) -> None:
    """Warn where both factors of low-rank adapters are averaged: mean(B A) is not mean(B) mean(A)."""
    trained = [name for name, p in setup.model.named_parameters() if p.requires_grad]
    first = {match[1].lower(): name for name in reversed(trained) if (match := FACTOR.search(name))}
    if setup.experiment.method.upload.is_model and len(first) == 2:
        told = f"clients train both factors of its adapters ('{first['a']}', '{first['b']}'); the product of mean"
        why = "factors is not the mean of the products, so that the average is biased"
        better = "freeze A, which is the same for all clients (FFA-LoRA), at half the bytes: requires_grad_(False)"
        how = 'in the class, or model.trainable = ["lora_B", ...] with the names of all else that is trained'
        warnings.warn(f"model: {told} {why}; better: {better} {how}", stacklevel=3)


class _Casts(TorchDispatchMode):
    """Notes whether a model converts floats to whole numbers, as it does to take its inputs as ids."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
            self.found |= not (result.is_floating_point() or result.dtype == torch.bool)
        return result


def _hint_of_ids(data: Dataset, experiment: Experiment) -> str:
    """What a message adds where samples are ids of tokens, or may be: whole numbers. Empty for all others."""
    if data.kind == "tokens":
        # Not the largest id itself: a site's message goes to the server.
        return "; a model needs an embedding for each id, up to the largest that `fedblend data show` gives"
    if data.kind != "features" or not all(bool((x == x.round()).all()) for x in data.train.x.split(ROWS)):
        return ""
    return (
        f"; the data's whole numbers reach the model as floats on the scale '{experiment.scale.name}'; valid for ids "
        'of tokens: data.kind = "tokens" (npz, hub), or for other codes scale = "none"'
    )


def _reads_ids(model: nn.Module, data: Dataset, scale: Fitted, experiment: Experiment, hint: str) -> bool:
    """Whether the model takes its inputs as ids: the data are tokens, or the model converts them to whole numbers."""
    if data.kind == "tokens":
        # A sample with the largest id of each half, so that no step finds one that the model has not.
        largest = [half.x[half.x.flatten(1).amax(1).argmax()] for half in (data.train, data.test)]
        _outputs(model, torch.stack(largest), experiment, hint)
        return True
    ends, casts = torch.stack([data.train.x.amin(0), data.train.x.amax(0)]), _Casts()
    with casts:
        _outputs(model, scale(ends), experiment, hint)
    if casts.found and not torch.equal(scale(ends), ends):
        told = f"converts its inputs to whole numbers, and so reads other ones than '{data.name}' has{hint}"
        warnings.warn(f"model: {experiment.model.name} {told}", stacklevel=3)
    return casts.found


def _outputs(model: nn.Module, x: torch.Tensor, experiment: Experiment, hint: str) -> Any:
    """Outputs for inputs in evaluation mode; raises :class:`FedblendError` where the model does not accept them."""
    try:
        with torch.no_grad(), evaluating(model):
            return model(x)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        told = f"cannot take samples of shape {list(x.shape[1:])}: {error}{hint}"
        raise FedblendError(f"model: {experiment.model.name} {told}") from None


def _require_types(model: nn.Module, name: str) -> None:
    frozen = frozen_names(model)
    for path, tensor in model.state_dict().items():
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in FLOATS and path not in frozen):
            told = f"is of type {tensor.dtype}, which clients cannot train and send; valid: float32, float64 or float16"
            raise FedblendError(f"model: '{path}' of {name} {told}; precision = \"bfloat16\" computes in bfloat16")


def _require_fit(model: nn.Module, sample: torch.Tensor, task: Task, experiment: Experiment, hint: str) -> None:
    outputs = _outputs(model, sample, experiment, hint)
    name, is_tensor = experiment.model.name, isinstance(outputs, torch.Tensor)
    if not is_tensor or tuple(outputs.shape) != (1, task.outputs):
        given = f"shape {list(outputs.shape)}" if is_tensor else f"type {type(outputs).__name__}"
        raise FedblendError(f"model: {name} gives outputs of {given} for one sample; valid: [1, {task.outputs}]")
    if task.kind == "classification" and bool((outputs >= 0).all()) and abs(float(outputs.sum()) - 1) < 1e-5:
        told = "gives probabilities, as of a softmax, but the loss takes logits, so that training is slow"
        warnings.warn(f"model: {name} {told}; leave the softmax out", stacklevel=3)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        valid = "a model of which at least one weight has requires_grad = True"
        raise FedblendError(f"model: {name} has no weights that are trained; valid: {valid}")
    layer = getattr(experiment.method.objective, "layer", None)
    stages: Any = getattr(model, "stages", None)
    if layer is not None and (stages is None or layer >= len(stages)):
        most = "no layers to choose from" if stages is None else f"{len(stages)} layers; valid: 1 to {len(stages) - 1}"
        raise FedblendError(f"method.objective.layer: {layer}: {name} has {most}")
