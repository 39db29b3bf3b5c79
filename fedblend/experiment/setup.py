"""The setup of a run from its experiment: load and partition the data, fit the scale, build the model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedblend.core.context import Task
from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError, listed, require_memory
from fedblend.core.random import lent_generator
from fedblend.core.setup import Setup
from fedblend.data.partitions import prepare
from fedblend.experiment.config import Experiment


def make_setup(experiment: Experiment, data: Dataset | None = None) -> Setup:
    """Load the data (unless given), partition them, fit the scale and build the model with its initial weights."""
    data = data or experiment.data.load()
    _require_pictures(experiment, data)
    population = split(experiment, data)
    scale = experiment.scale.fit(data)
    task = Task(data.task, data.outputs)
    experiment.method.upload.require_possible(task)
    sample = scale(data.train.x[:1])
    require_model_memory(experiment, tuple(sample.shape[1:]), task.outputs)
    with lent_generator(experiment.seed, "model"):
        model = experiment.model.build(tuple(sample.shape[1:]), task.outputs)
    _require_fit(model, sample, task, experiment)
    if features := experiment.method.upload.features(model, sample):
        task = replace(task, features=features)
    setup = Setup(experiment, data, population, scale, model, task)
    _warn_of_noisy_variances(setup)
    return setup


def split(experiment: Experiment, data: Dataset) -> Population:
    """Divide the training half of ``data`` among the experiment's clients."""
    validation = experiment.validation
    return prepare(
        experiment.partition,
        data,
        experiment.seed,
        experiment.fraction,
        experiment.holdout,
        validation.clients,
        validation.server,
        experiment.arrival is not None,
    )


def require_model_memory(experiment: Experiment, shape: tuple[int, ...], outputs: int) -> None:
    """Raise :class:`FedblendError` for a model that is larger than the memory, before it is built.

    A network on PyTorch's device "meta" has shapes and no numbers. A network of the user's own may not be buildable
    there, and is not checked.
    """
    try:
        with lent_generator(experiment.seed, "model"), torch.device("meta"):
            model = experiment.model.build(shape, outputs)
            needed = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    except FedblendError:
        raise
    except (RuntimeError, OverflowError) as error:
        if any(words in str(error) for words in ("overflow", "storage size", "too large", "int64")):
            raise FedblendError(f"model: {experiment.model.name} is too large ({error}); take a smaller one") from None
        return
    except Exception:
        return
    require_memory(needed, f"model: {experiment.model.name}", "take a smaller one")


def _require_pictures(experiment: Experiment, data: Dataset) -> None:
    """Raise :class:`FedblendError` if local training augments pictures and the data are none, or too small."""
    shape = tuple(data.train.x.shape[1:])
    for one in experiment.train.augment:
        if data.kind != "image" or len(shape) != 3:
            raise FedblendError(
                f"train.augment: '{one.name}' needs pictures, but '{data.name}' holds {data.kind} of shape "
                f"{list(shape)}; valid: no augmentation"
            )
        one.require_possible(shape)


def _warn_of_noisy_variances(setup: Setup) -> None:
    """Warn where noise falls on running variances, which it can make negative."""
    experiment = setup.experiment
    if not getattr(experiment.protection, "size", 0.0) or not experiment.method.upload.is_model:
        return
    if variances := [name for name in setup.shared(setup.model.state_dict()) if name.endswith("running_var")]:
        warnings.warn(
            f"protection: batch norm's running statistics ({listed(variances)}, and their means) are clipped and "
            "noised with the weights; a variance that noise makes negative counts as 0, and the layer's outputs are "
            "then hundreds of times too large; better: group norm, or fedbn, whose batch norms stay at the clients",
            stacklevel=3,
        )


def _require_fit(model: nn.Module, sample: torch.Tensor, task: Task, experiment: Experiment) -> None:
    """Raise :class:`FedblendError` for a model that does not accept the data, has other outputs, or is all frozen."""
    was_training = model.training
    try:
        with torch.no_grad():
            outputs = model.eval()(sample)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        raise FedblendError(
            f"model: {experiment.model.name} cannot take samples of shape {list(sample.shape[1:])}: {error}"
        ) from None
    finally:
        model.train(was_training)
    if not isinstance(outputs, torch.Tensor) or tuple(outputs.shape) != (1, task.outputs):
        is_tensor = isinstance(outputs, torch.Tensor)
        given = f"shape {list(outputs.shape)}" if is_tensor else f"type {type(outputs).__name__}"
        raise FedblendError(
            f"model: {experiment.model.name} gives outputs of {given} for one sample; valid: [1, {task.outputs}]"
        )
    if task.kind == "classification" and bool((outputs >= 0).all()) and abs(float(outputs.sum()) - 1) < 1e-5:
        warnings.warn(
            f"model: {experiment.model.name} gives probabilities, as of a softmax, but the loss takes logits, so that "
            "training is slow; leave the softmax out",
            stacklevel=3,
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise FedblendError(
            f"model: {experiment.model.name} has no weights that are trained; valid: a model of which at least one "
            "weight has requires_grad = True"
        )
    layer = getattr(experiment.method.objective, "layer", None)
    stages: Any = getattr(model, "stages", None)
    if layer is not None and (stages is None or layer >= len(stages)):
        most = "no layers to choose from" if stages is None else f"{len(stages)} layers; valid: 1 to {len(stages) - 1}"
        raise FedblendError(f"method.objective.layer: {layer}: {experiment.model.name} has {most}")
