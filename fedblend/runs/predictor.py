"""A run's model for use: it predicts for samples as they are stored, and is exported as a program without fedblend."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from fedblend import __version__
from fedblend.core.dataset import TaskKind
from fedblend.core.errors import FedblendError, legible, missing_package
from fedblend.core.files import make_folder_of, write_atomically
from fedblend.core.paths import given_path
from fedblend.core.setup import Setup
from fedblend.core.trees import Tensors, differing, for_file
from fedblend.data.texts import PANGRAM
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import require_model_memory
from fedblend.runs import checkpoint, forms
from fedblend.runs.directory import FACTS, RunDirectory, reading

CHUNK = 256  # Samples that are predicted at a time

FORMATS = {
    ".safetensors": "the weights, with a .json file for scale and classes",
    ".pt2": "a program of torch.export, which needs only PyTorch",
    ".onnx": "a program for any runtime of ONNX (extra 'onnx')",
}


class Deployed(nn.Module):
    """The frozen backbone if there is one, scale, network, and softmax of classes or sigmoid of labels as one module.

    It takes samples as stored (:class:`fedblend.core.dataset.Samples`) and returns probabilities [n, C], or the
    predicted numbers [n, q] of a regression.
    """

    factor: torch.Tensor | None
    offset: torch.Tensor

    def __init__(
        self,
        net: nn.Module,
        factor: torch.Tensor | None,
        offset: torch.Tensor | None,
        codes: int,
        task: TaskKind,
        encoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.net, self.codes, self.task = net, codes, task
        self.register_buffer("factor", factor)
        self.register_buffer("offset", offset)

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        """Predict for stored samples [n, ...]."""
        stored = stored if self.encoder is None else self.encoder(stored)
        if self.codes:
            inputs = (stored.unsqueeze(-1) == torch.arange(self.codes, device=stored.device)).to(torch.float32)
        else:
            inputs = stored if self.factor is None else stored.to(torch.float32) * self.factor + self.offset
        outputs: torch.Tensor = self.net(inputs)
        if self.task == "classification":
            return outputs.softmax(1)
        return outputs.sigmoid() if self.task == "multi-label" else outputs


def require_one_model(experiment: Experiment, folder: Path) -> None:
    """Raise :class:`FedblendError` for a run in ``folder`` whose clients keep models or layers of their own."""
    if experiment.method.stateful_clients or experiment.method.personal.keeps == "layers":
        raise FedblendError(f"{folder}: its clients keep models or layers of their own, so that there is no one model")


@dataclass(frozen=True, eq=False)
class Predictor:
    """The final model of a run, with what its inputs and outputs mean. Classes are predicted by their names."""

    module: Deployed
    """From stored samples to probabilities or numbers, in evaluation mode."""
    description: dict[str, Any]
    """Name, kind (as of :class:`.Dataset`), shape and type of a stored sample, classes or labels, scale, versions."""
    tokens: Callable[[list[str]], np.ndarray] | None = None
    """From texts to samples, for a run on a table's texts."""

    @staticmethod
    def of_setup(setup: Setup, weights: Tensors, round: int) -> Predictor:
        """The predictor of a finished run."""
        data, scale = setup.data, setup.scale.describe()
        facts = {"name": data.name, "kind": data.kind, "shape": data.train.x.shape[1:], "classes": data.classes}
        facts |= {name: data.facts[name] for name in ("table", "backbone") if name in data.facts}
        setup.model.load_state_dict(dict(weights))
        return _predictor(setup.experiment, facts | {"labels": data.labels}, scale, setup.model, round)

    @staticmethod
    def of_run(directory: RunDirectory, trust: bool = False, best: bool = False) -> Predictor:
        """The predictor of a run's last checkpoint, or of its best model (callback ``keep-best``).

        The run's data are not read. Raises :class:`FedblendError` for a run without a checkpoint, one whose clients
        keep their own models, or one that names code of its own, unless ``trust``.
        """
        with reading([directory], trust):
            experiment, facts = directory.experiment(), directory.facts()
            if not directory.has_begun(directory.path):
                raise FedblendError(f"{directory.path}: failed before it began: {directory.status()['reason']}")
            forms.require_sound(facts, forms.FactsOfModel, directory.path / FACTS)
            if best:
                round, weights = checkpoint.read_best(directory.path)
            elif (state := checkpoint.read(directory.path)) is not None:
                round, weights = state.round, state.weights
            else:
                raise FedblendError(f"{directory.path}: has no checkpoint yet; run it first")
            require_one_model(experiment, directory.path)
            data, scale = facts["data"], facts["scale"]
            inputs = (*data["shape"], scale["vocabulary"]) if "vocabulary" in scale else tuple(data["shape"])
            outputs = data["outputs"]
            require_model_memory(experiment, inputs, outputs)
            net = experiment.model.build(inputs, outputs)
            if different := differing(net.state_dict(), weights):
                raise FedblendError(f"{directory.path}: its weights are of another model ('{different[0]}' differs)")
            net.load_state_dict(weights)
            return _predictor(experiment, data, scale, net, round)

    def predict_proba(self, x: Any) -> np.ndarray:
        """Probabilities float32 [n, C] of samples as stored (array or tensor [n, ...]); in regression, numbers [n, q].

        A run on a table's texts takes a list of texts, too. The probabilities of labels are independent of each other;
        those of classes have the sum 1. Raises :class:`FedblendError` for another shape, and for NaN and infinity.
        """
        samples = self._samples(x)
        with torch.no_grad():
            try:
                parts = [self.module(samples[i : i + CHUNK]) for i in range(0, len(samples), CHUNK)]
            except IndexError as error:
                raise FedblendError(f"samples: the model has no such token ({error})") from None
        return torch.cat(parts).numpy() if parts else np.empty((0, len(self.classes or self.labels)), np.float32)

    def predict(self, x: Any) -> np.ndarray:
        """The most probable class's name, as text, for each sample as stored; of a regression, numbers float32 [n, q].

        Of multi-label data, bool [n, L]: the labels whose probability is above 1/2. Class numbers, as data sets store
        them, are ``predict_proba(x).argmax(1)``; so the accuracy on samples ``x`` with class numbers ``y`` is
        ``(predictor.predict(x) == np.array(predictor.classes)[y]).mean()``.
        """
        outputs = self.predict_proba(x)
        if self.labels:
            return outputs > 0.5
        return np.array(self.classes)[outputs.argmax(1)] if self.classes else outputs

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty for a regression, and for multi-label data."""
        return tuple(self.description["classes"])

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels of multi-label data, else empty."""
        return tuple(self.description.get("labels", ()))

    def _samples(self, x: Any) -> torch.Tensor:
        shape, kind = tuple(self.description["shape"]), self.description["kind"]
        if self.tokens and isinstance(x, list) and x and all(isinstance(one, str) for one in x):
            x = self.tokens(x)
        try:
            array = np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x)
        except (ValueError, TypeError):
            raise FedblendError(f"samples: a {type(x).__name__}; valid: an array or a tensor of samples") from None
        if kind == "image" and array.ndim == len(shape) and shape[0] == 1:
            array = array[:, None]
        if array.dtype.kind not in ("iu" if kind == "tokens" else "biuf") or array.shape[1:] != shape:
            valid = (
                f"{_number_type(kind)} of shape {['n', *shape]}, as the data set '{self.description['data']}' has them"
            )
            raise FedblendError(f"samples: {array.dtype} of shape {list(array.shape)}; valid: {valid}")
        if kind == "image" and array.dtype != np.uint8:
            how = "of pictures in [0, 1], which fedblend.from_torch stores as pixels: (255 * x).round() as uint8"
            raise FedblendError(f"samples: {array.dtype}; valid: pixels as uint8, 0 to 255 ({how})")
        with np.errstate(over="ignore"):
            samples = torch.from_numpy(np.ascontiguousarray(array, np.dtype(_number_type(kind))))
        if bad := int((~samples.flatten(1).isfinite().all(1)).sum()):
            raise FedblendError(f"samples: {bad} of {len(samples)} hold NaN or infinity; all numbers must be finite")
        return samples

    # Export -----------------------------------------------------------------------------------------------------

    def export(self, path: Path | str) -> list[Path]:
        """Write the model in the format of the path's suffix (:data:`FORMATS`); return the written files.

        Raises :class:`FedblendError` for another suffix, a missing package or a folder that cannot be written.
        """
        path = given_path(path, "path")
        if path.suffix not in FORMATS:
            valid = "; ".join(f"{suffix} ({what})" for suffix, what in FORMATS.items())
            raise FedblendError(f"{path}: '{path.suffix}' is not a format of models; valid: {valid}")
        make_folder_of(path)
        description = path.with_suffix(".json")
        if path.suffix == ".safetensors":
            # Without the prefix "net.", so that the user's own copy of the network loads them.
            weights = for_file(self.module.net.state_dict())
            write_atomically(path, save(weights, {"fedblend": json.dumps(self.description)}))
        else:
            write_atomically(path, self._program(path.suffix))
        write_atomically(description, json.dumps(self.description, indent=1) + "\n")
        return [path, description]

    def _program(self, suffix: str) -> bytes:
        """The module as the bytes of a program that takes any number of samples."""
        # Two, since a batch of one would be traced as constant.
        example = torch.zeros(2, *self.description["shape"], dtype=getattr(torch, self.description["type"]))
        batch = {"stored": {0: torch.export.Dim("n", min=1)}}
        buffer = io.BytesIO()
        try:
            with torch.no_grad(), _quiet():
                program = torch.export.export(self.module, (example,), dynamic_shapes=batch)
                if suffix == ".pt2":
                    torch.export.save(program, buffer, extra_files={"fedblend.json": json.dumps(self.description)})
                else:
                    names: dict[str, Any] = {"input_names": ["stored"], "output_names": ["outputs"]}
                    onnx = torch.onnx.export(program, (example,), dynamo=True, **names)
                    assert onnx is not None
                    onnx.model.metadata_props["fedblend"] = json.dumps(self.description)
                    buffer.write(onnx.model_proto.SerializeToString())
        except ImportError as error:
            raise missing_package("a model in the format .onnx", str(error.name), "onnx") from None
        except Exception as error:  # of the many kinds that tracing a network of one's own may raise
            told = f"{self.description['model']} cannot be traced as a program ({legible(error)})"
            raise FedblendError(f"model: {told}; valid: the weights alone, as .safetensors") from None
        return buffer.getvalue()


def _predictor(
    experiment: Experiment, data: dict[str, Any], scale: dict[str, Any], net: nn.Module, round: int
) -> Predictor:
    shape, classes, labels = list(data["shape"]), list(data["classes"]), list(data.get("labels", ()))
    task: TaskKind = "classification" if classes else "multi-label" if labels else "regression"
    factor = offset = None
    factors, offsets = (scale.get(name, []) for name in ("factor", "offset"))
    is_affine = "vocabulary" not in scale and data["kind"] != "tokens"
    if is_affine and not len(factors) == len(offsets) == shape[0]:
        told = f"{len(factors)} factors and {len(offsets)} offsets for samples of shape {shape}"
        raise FedblendError(f"scale: {told}; the run is damaged")
    if is_affine:
        column = (-1, *[1] * (len(shape) - 1))
        factor, offset = (torch.tensor(one, dtype=torch.float32).reshape(column) for one in (factors, offsets))
    encoder, backbone = None, data.get("backbone")
    if backbone:
        encoder, digest = experiment.data.encoder(backbone["raw"])
        if digest != backbone["digest"]:
            told = f"the weights or inputs of {experiment.data.model} are not those of the run"
            valid = "the backbone as it was (its file of weights, its package's version)"
            raise FedblendError(f"data.features: {told}; valid: {valid}")
        data, shape = data | backbone["raw"], backbone["raw"]["shape"]
    table, source = data.get("table", {}), getattr(experiment.data, "of", experiment.data)
    tokens = source.tokens if "pangram" in table else None
    if tokens and tokens([PANGRAM])[0, 0].tolist() != table["pangram"]:
        told = f"'{source.tokenizer}' makes other tokens than in the run"
        raise FedblendError(f"data.tokenizer: {told}; valid: the tokenizer as it was")
    module = Deployed(net, factor, offset, scale.get("vocabulary", 0), task, encoder)
    description: dict[str, Any] = {
        "name": experiment.name,
        "data": data["name"],
        "kind": data["kind"],
        "shape": shape,
        "type": _number_type(data["kind"]),
        "classes": classes,
        **({"labels": labels} if labels else {}),
        "scale": scale,
        **{name: data[name] for name in ("table", "backbone") if name in data},
        "model": experiment.model.name,
        "method": experiment.method.label or experiment.method.name,
        "round": round,
        "fedblend": __version__,
        "torch": torch.__version__,
    }
    return Predictor(module.eval(), description, tokens)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _number_type(kind: str) -> str:
    return {"image": "uint8", "text": "int64", "tokens": "int64"}.get(kind, "float32")
