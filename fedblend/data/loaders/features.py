"""Features that a frozen backbone makes of another data set's samples, computed once and kept in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedblend import __version__
from fedblend.core import registry
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError, or_valid, require_memory
from fedblend.core.files import sole_writer, write_atomically
from fedblend.core.random import lent_generator
from fedblend.core.registry import Count, Positive, part
from fedblend.core.trees import digest_of
from fedblend.data.backbones import LITE0, LITE0_SIZE, MINILM, Encoder, backbone
from fedblend.data.loaders.files import check

ROWS = 512  # Samples whose features are one file, so that an interrupted computation loses at most their time
QUIET_S = 2.0  # Seconds of computing before progress is shown
REMEDY = "free disk space, or name another folder for caches in XDG_CACHE_HOME"


def _known(model: str) -> str:
    own = (LITE0, MINILM)
    if model not in own and ":" not in model:
        others = ("timm:NAME", "torchvision:NAME", "transformers:NAME", "module:Class")
        raise ValueError(f"unknown backbone{or_valid(model, (*own, *others))}")
    return model if model in own else registry.require_trusted(model, "data.features.model")


@part("dataset", "features")
class BackboneFeatures:
    """Features of a frozen backbone in place of another data set's samples, with its targets, clients and names.

    In a file: ``data = { name = "cifar10", features = { model = "efficientnet-lite0" } }``. Features are computed in
    evaluation mode, on the machine that has the samples, and kept in the folder ``features`` of fedblend's cache: a
    change of the backbone (weights, code, arguments), of its inputs, of the samples or of the versions of PyTorch and
    fedblend makes them anew. After Ctrl-C the next start goes on.
    """

    of: Annotated[
        Any, BeforeValidator(lambda spec: registry.build("dataset", spec, "data")), WithJsonSchema({"part": "dataset"})
    ]
    """The data set with the samples."""
    model: Annotated[str, AfterValidator(_known)]
    """The backbone: "efficientnet-lite0" or, for texts, "minilm" (extra `pretrained`); "timm:NAME", "torchvision:NAME"
    or "transformers:NAME", without its classifier; or an `nn.Module`, as `package.module:Class`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor, by name, such as the file of its weights."""
    scale: Literal["imagenet", "unit", "symmetric", "none"] | None = None
    """Scale of pictures: [0, 1] by ImageNet's mean and deviation, [0, 1], [-1, 1], or pixels (default: symmetric
    for efficientnet-lite0, else imagenet; samples that are no pictures have none).
    """
    size: Count | None = None
    """Side of the square to which pictures are resized (default: 96 for efficientnet-lite0, else as they are)."""
    batch: Count = 16
    """Samples in one batch: 16 are fast on a processor, a GPU takes more. Features differ by float32 rounding only."""
    device: str = "cpu"
    """The PyTorch device that computes."""
    max_gb: Positive = 20.0
    """Most gigabytes of features."""

    def load(self) -> Dataset:
        """Load the samples and compute their features, float32 [n, d], or take them from the cache."""
        data = self.of.load()
        encoder, digest = self.encoder(data)
        width, samples = self._width(encoder, data.train.x[:1]), len(data.train) + len(data.test)
        if (size := samples * width * 4 / 1e9) > self.max_gb:
            raise FedblendError(
                f"data.features.max_gb: {self.max_gb:g}: {width:,} features of {samples:,} samples are {size:.3g} GB; "
                f"valid: at least {math.ceil(size * 1000) / 1000:g}, or a backbone with fewer features"
            )
        require_memory(samples * width * 4, "data.features: the features", "take a backbone with fewer")
        with _progress(samples) as done:
            train, test = (self._half(encoder, digest, half, done) for half in (data.train, data.test))
        raw = {"name": data.name, "kind": data.kind, "shape": list(data.train.x.shape[1:])}
        facts = data.facts | {"backbone": {"model": self.model, "digest": digest, "scale": encoder.scale, "raw": raw}}
        name = f"{data.name} ({self.model})"
        made = replace(data, name=name, kind="features", train=train, test=test, facts=facts, vocabulary=0)
        return check(made)

    def encoder(self, data: Dataset | Mapping[str, Any]) -> tuple[Encoder, str]:
        """What makes features of the samples of ``data`` (or its facts), and the digest of its weights and inputs."""
        name, kind = (data["name"], data["kind"]) if isinstance(data, Mapping) else (data.name, data.kind)
        usual = "symmetric" if self.model == LITE0 else "imagenet"  # what the network was trained with
        scale = self.scale or (usual if kind == "image" else "none")
        for option, value in (("scale", scale if scale != "none" else None), ("size", self.size)):
            if value is not None and kind != "image":
                raise FedblendError(
                    f"data.features.{option}: {value!r} is for pictures, but '{name}' holds {kind}; leave it out"
                )
        with lent_generator(0, "backbone"):  # so that weights that a constructor draws are always the same
            net = backbone(self.model, self.arguments)
        encoder = Encoder(net, scale, self.size or (LITE0_SIZE if self.model == LITE0 else None))
        inputs = json.dumps([self.model, encoder.size, digest_of(encoder.state_dict())])
        return encoder, hashlib.sha256(inputs.encode()).hexdigest()

    def _width(self, encoder: Encoder, sample: Tensor) -> int:
        """The number of features. Raises :class:`FedblendError` for a backbone that does not take the samples."""
        try:
            with torch.no_grad():
                features = encoder.to(self.device)(sample.to(self.device))
            if not features.is_floating_point():
                raise TypeError(f"its outputs are {features.dtype}; valid: floats")
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
            raise FedblendError(
                f"data.features.model: {self.model} cannot take samples of shape {list(sample.shape[1:])}: {error}"
            ) from None
        return features.shape[1]

    def _half(self, encoder: Encoder, digest: str, half: Samples, done: Callable[[int], None]) -> Samples:
        """The half with its features: a file for each :data:`ROWS` samples, each computed by one process."""
        import pooch

        # Not of PyTorch's own layers, whose version is in the key.
        layers = {type(one) for one in encoder.modules() if not type(one).__module__.startswith("torch.")}
        code = [_source(layer) for layer in layers]
        key = [digest, self.arguments, sorted(set(code)), torch.__version__, __version__, digest_of({"x": half.x})]
        name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
        folder = Path(pooch.os_cache("fedblend")) / "features" / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedblendError(f"{folder}: cannot be created ({error.strerror}); {REMEDY}") from None
        found = []
        for number, rows in enumerate(half.x.split(ROWS)):
            path = folder / f"{number:06}.safetensors"
            features = _read(path, len(rows))
            if features is not None:
                done(len(rows))
            else:
                with sole_writer(folder, math.inf):  # however long the other one computes
                    features = _read(path, len(rows))  # another process may have written them meanwhile
                    if features is None:
                        features = self._compute(encoder, rows, done)
                        write_atomically(path, save({"features": features}), REMEDY)
            found.append(features)
        return replace(half, x=torch.cat(found))

    def _compute(self, encoder: Encoder, rows: Tensor, done: Callable[[int], None]) -> Tensor:
        made = []
        with torch.no_grad():
            for batch in rows.split(self.batch):
                made.append(encoder(batch.to(self.device)).float().cpu())
                done(len(batch))
        return torch.cat(made)


def features_of(spec: Any) -> Any:
    """A data set with the key ``features`` as the data set "features" of it; any other as it is given."""
    # Of a table, they are the names of its columns.
    if not isinstance(spec, Mapping) or "features" not in spec or isinstance(spec["features"], list | tuple):
        return spec
    of, given = {key: value for key, value in spec.items() if key != "features"}, spec["features"]
    if not isinstance(given, Mapping):
        raise FedblendError(f'data.features: {given!r} is not valid; write a table, such as {{ model = "{LITE0}" }}')
    model = given.get("model")
    if "text" in of and isinstance(model, str) and (model == MINILM or model.startswith("transformers:")):
        of = {"tokenizer": model} | of
    return registry.build("dataset", {"of": of, **given, "name": "features"}, "data.features")


def _source(layer: type) -> str:
    """The digest of the file of a layer's class; empty for a class without a file."""
    with contextlib.suppress(OSError, TypeError):
        return hashlib.sha256(Path(inspect.getfile(layer)).read_bytes()).hexdigest()
    return ""


def _read(path: Path, rows: int) -> Tensor | None:
    """Features that were computed before; ``None`` if there are none, or the file is damaged."""
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        features = load_file(path)["features"]
        return features if len(features) == rows else None
    return None


@contextmanager
def _progress(samples: int) -> Iterator[Callable[[int], None]]:
    """Count computed samples, and show them after :data:`QUIET_S` seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("computing features"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task, begun = progress.add_task("", total=samples), time.monotonic()
    with ExitStack() as shown:

        def done(number: int) -> None:
            progress.advance(task, number)
            if time.monotonic() - begun > QUIET_S and not progress.live.is_started:
                shown.enter_context(progress)

        yield done
