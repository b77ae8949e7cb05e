"""Layers whose index keeps a key of each token: it comes back to the last bit, in whatever format the values are."""

import pytest
import torch

from ppd_runtime.models.stage.caches import LayersMemory
from ppd_runtime.models.stage.indexed import IndexedLayer

INDEX, DIM = 6, 5


@pytest.mark.parametrize("of_keys", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_index_keys_keep_their_bits(dtype: torch.dtype, of_keys: torch.dtype) -> None:
    layer = IndexedLayer(8, LayersMemory(1), 0, INDEX)
    values, keys = torch.randn(1, 1, 5, DIM).to(dtype), torch.randn(1, 5, INDEX).to(of_keys)
    for part in (slice(0, 3), slice(3, 5)):
        _, seen = layer.update(values[:, :, part], values[:, :, part])
        found = layer.update_indexer(keys[:, part])
        assert seen.dtype == dtype
        assert seen.equal(values[:, :, : part.stop])
        assert found.dtype == of_keys
        assert found.equal(keys[:, : part.stop])
