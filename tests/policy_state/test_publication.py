"""Published versions: complete, counted, checksummed, or not there."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miles_olmo.base.errors import CheckpointError
from miles_olmo.policy import publication as publications
from miles_olmo.policy.publication import prune_publications, write_publication
from miles_olmo.policy.tensor_files import read_tensors, tensor_sha256, write_tensors
from miles_olmo.wire.publication import Publication

from .conftest import build_module


def test_every_tensor_is_published_once_with_its_checksum(module, adapter, tmp_path):
    publication = write_publication(module, adapter, tmp_path / "publish/v000012", 12)
    assert Publication.read(tmp_path / "publish/v000012") == publication
    tensors = dict(adapter.publication_tensors(module))
    assert [tensor.name for tensor in publication.tensors] == list(tensors)
    loaded = {}
    for path in publication.paths:
        loaded |= load_file(path)
    assert loaded.keys() == tensors.keys()
    for entry in publication.tensors:
        tensor = tensors[entry.name]
        assert torch.equal(loaded[entry.name], tensor)
        assert loaded[entry.name].dtype == tensor.dtype
        assert entry.shape == tuple(tensor.shape)
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert entry.sha256 == hashlib.sha256(data).hexdigest() == tensor_sha256(tensor)
    assert publication.version == 12


def test_an_engine_loads_exactly_what_was_published(adapter, tmp_path):
    trainer, engine = build_module(seed=1), build_module(seed=2)
    publication = write_publication(trainer, adapter, tmp_path / "v000001", 1)
    loaded = {}
    for path in publication.paths:
        loaded |= load_file(path)
    adapter.load_tensors(engine, loaded)
    own = {name: tensor_sha256(t) for name, t in adapter.publication_tensors(engine)}
    assert own == publication.checksums


def test_large_policies_are_cut_into_several_files(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(publications, "MAX_FILE_BYTES", 20_000)
    module = build_module()
    publication = write_publication(module, adapter, tmp_path / "v000001", 1)
    assert len(publication.paths) > 3
    names = [name for path in publication.paths for name in load_file(path)]
    assert sorted(names) == sorted(name for name, _ in adapter.publication_tensors(module))
    assert all(Path(path).stat().st_size < 25_000 for path in publication.paths)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_policy_with_nan_is_refused_by_name(adapter, tmp_path, bad):
    module = build_module(num_layers=1)
    with torch.no_grad():
        module.blocks["0"].routed_experts.w_down[3, 0, 0] = bad
    with pytest.raises(CheckpointError) as caught:
        write_publication(module, adapter, tmp_path / "v000001", 1)
    assert caught.value.code == "E420"
    assert caught.value.details["tensors"] == ["model.layers.0.mlp.experts.3.down_proj.weight"]
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_nothing_visible(adapter, tmp_path):
    module = build_module(num_layers=1)
    child = os.fork()
    if child == 0:
        publications.json.dumps = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
        write_publication(module, adapter, tmp_path / "v000001", 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [entry.name[0] for entry in tmp_path.iterdir()] == ["."]
    prune_publications(tmp_path, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_a_named_error(adapter, tmp_path):
    module = build_module(num_layers=1)
    write_publication(module, adapter, tmp_path / "v000001", 1)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            write_publication(module, adapter, tmp_path / "v000002", 2)
        except CheckpointError as error:
            os._exit(42 if error.code == "E421" else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert [entry.name for entry in tmp_path.iterdir()] == ["v000001"]


def test_only_the_newest_versions_are_kept(adapter, tmp_path):
    module = build_module(num_layers=1)
    for version in (0, 1, 2, 3):
        write_publication(module, adapter, tmp_path / f"v{version:06d}", version)
    (tmp_path / "notes.txt").write_text("not a publication")
    assert prune_publications(tmp_path, keep=2) == [0, 1]
    assert sorted(e.name for e in tmp_path.iterdir()) == ["notes.txt", "v000002", "v000003"]
    assert prune_publications(tmp_path, keep=2) == []
    assert prune_publications(tmp_path / "none", keep=2) == []


def test_tensor_files_hold_every_dtype_shape_and_stride(tmp_path):
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
    dtypes += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "name with ümlaut": torch.ones(1, dtype=torch.uint8),
    }
    written = write_tensors(tmp_path / "x.safetensors", tensors)
    loaded = read_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys() == written.tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert (written.num_bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
