"""Images on the page: what left the clients."""

import shutil

import numpy as np
import pytest
import torch
from report_helpers import HOSTILE, experiment, pixels
from safetensors import safe_open
from safetensors.torch import save_file

from fedblend.analysis.plotting import png_data_url
from fedblend.core.errors import FedblendError
from fedblend.report import shared_images
from fedblend.runs import checkpoint
from fedblend.runs.directory import find_runs
from fedblend.runs.groups import group
from fedblend.runs.runner import execute


def test_images_are_the_means_of_each_clients_samples(folder):
    gallery = next(g for g in shared_images.galleries(group(find_runs([folder]))) if "fedmix" in g.methods)
    assert gallery.methods == ("fedmix", HOSTILE)  # both share the same means
    assert (gallery.shown, gallery.entries, gallery.raw, gallery.seed) == (6, 6, False, 0)
    made = execute(experiment("fedmix", 0), folder.parent / "again").setup
    for picture in (gallery.images[0], gallery.images[5]):
        held = torch.from_numpy(made.population.indices(picture.client))
        mean = made.data.train.x[held].double().mean(0)[0].numpy()
        image = pixels(picture.url)
        assert image.shape == (8, 8)
        assert np.abs(image - mean).max() <= 1
        labels = made.data.train.y[held].numpy()
        common = np.bincount(labels).argmax()
        assert picture.caption.startswith(f"{common}: {100 * (labels == common).mean():.0f} %")
    (raw,) = (g for g in shared_images.galleries(group(find_runs([folder]))) if "global-mixup" in g.methods)
    assert (raw.raw, raw.caption, raw.shown, len(raw.images)) == (True, "Each image is one raw sample.", 24, 24)
    assert {picture.client for picture in raw.images} == set(range(6))
    sizes = made.population.sizes
    assert gallery.caption.endswith(f"held when it shared: {sizes.min()} to {sizes.max()}.")


@pytest.mark.parametrize(
    "changed",
    [{"owner": torch.zeros(6)}, {"owner": torch.full((6,), 99)}, {"shared_sizes": torch.ones(6)}],
    ids=["float", "unknown", "sizes"],
)
def test_a_checkpoint_whose_owners_are_no_clients_is_damaged(folder, tmp_path, changed):
    (run,) = (run for run in find_runs([folder]) if run.path.name == "fedmix-seed0")
    copy = shutil.copytree(run.path, tmp_path / "fedmix-seed0")
    path = copy / checkpoint.NAME
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors | changed, path, file.metadata())
    with pytest.raises(FedblendError, match="is damaged: its 'owner' does not name the client of each shared entry"):
        shared_images.galleries(group(find_runs([copy])))


def test_images_come_from_all_clients_before_a_second_one_of_any():
    assert shared_images.rows_across_clients(np.array([0, 0, 0, 1, 1, 2]), 4).tolist() == [0, 1, 3, 5]
    assert shared_images.rows_across_clients(np.array([4, 4]), 24).tolist() == [0, 1]


def test_colour_images_keep_their_colours():
    image = np.zeros((3, 2, 2), np.float32)
    image[0, 0, 0] = 1
    made = pixels(png_data_url(image))
    assert made.shape == (2, 2, 3)
    assert made[0, 0].tolist() == [255, 0, 0]
    assert made[1, 1].tolist() == [0, 0, 0]
