"""Meshes that take the devices that there are."""

from dataclasses import replace

import pytest

from sparsejax.config import (
    MeshConfig,
)


@pytest.mark.parametrize(
    ("mesh", "devices", "data"),
    [
        (MeshConfig(), 1, 1),
        (MeshConfig(), 8, 8),
        (MeshConfig(fsdp=2, tensor=2), 8, 2),
        (MeshConfig(data=2, fsdp=2, tensor=2), 8, 2),
    ],
)
def test_a_mesh_takes_the_devices_that_are_there(mesh, devices, data):
    resolved = mesh.resolve(devices)
    assert resolved == replace(mesh, data=data)
    assert resolved.devices == devices


@pytest.mark.parametrize(
    ("mesh", "token_shards"),
    [
        (MeshConfig(data=3), 3),
        (MeshConfig(data=1, fsdp=5), 5),
        (MeshConfig(data=1, tensor=7), 1),
        (MeshConfig(data=3, fsdp=5, tensor=7), 15),
        (MeshConfig(fsdp=5, tensor=7), 0),
    ],
)
def test_tokens_are_split_over_data_and_fsdp_alone(mesh, token_shards):
    assert mesh.token_shards == token_shards


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        (MeshConfig(data=2), 1),
        (MeshConfig(data=2), 4),
        (MeshConfig(fsdp=3), 8),
        (MeshConfig(fsdp=2, tensor=2), 1),
    ],
)
def test_a_mesh_of_other_devices_is_refused(mesh, devices):
    message = rf"mesh\.data={mesh.data} x .* is not the number of devices, {devices};"
    with pytest.raises(ValueError, match=message):
        mesh.resolve(devices)
