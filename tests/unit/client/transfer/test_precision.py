from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from client.transfer.precision import Dtype, convert_folder, to_dtype
from swarm.errors import InvalidModel

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_rounds_as_torch_does(dtype: Dtype) -> None:
    """Every pattern of the upper half with those of the lower half that decide how it rounds."""
    upper = np.arange(1 << 16, dtype="<u4") << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype="<u4")
    values = (upper[:, None] | lower).reshape(-1).view("<f4")
    expected = torch.from_numpy(values.copy()).to(DTYPES[dtype])
    fits = torch.isfinite(expected) | ~torch.isfinite(torch.from_numpy(values.copy()))
    values, expected = values[fits.numpy()], expected[fits]
    got = torch.frombuffer(bytearray(to_dtype(values, dtype)), dtype=DTYPES[dtype])
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "keep"])
def test_a_folder_is_rewritten_with_its_index_and_config(tmp_path: Path, dtype: Dtype) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.zeros(0), "d": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32", "hidden_size": 5}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 92}}))
    convert_folder(tmp_path, dtype)
    wanted = DTYPES.get(dtype, torch.float32)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert tensor.dtype == wanted
        assert torch.equal(tensor, tensors[name].to(wanted))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"dtype": "float32" if dtype == "keep" else dtype, "hidden_size": 5}
    total = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == 23 * wanted.itemsize
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]


def test_what_does_not_fit_or_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"wide": torch.tensor([1.0, 7e4])}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match="tensor wide does not fit: 70000 is too large for float16"):
        convert_folder(tmp_path, "float16")
    save_file({"whole": torch.tensor([1, 2])}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match="whole"):
        convert_folder(tmp_path, "bfloat16")
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04")
    with pytest.raises(InvalidModel):
        convert_folder(tmp_path, "bfloat16")
