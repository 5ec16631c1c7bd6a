"""Packed batches: right shift, right order, right padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ci_llm.data.batches import pack, padded
from ci_llm.data.encoder import Example


def row(input_ids: list[int], supervised: list[int]) -> Example:
    return Example(np.array(input_ids, np.int32), np.array(supervised, bool))


class Rows:
    """Fifty rows of random length and content, the same for the same number."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> Example:
        generator = np.random.default_rng(number)
        length = int(generator.integers(2, 30))
        supervised = generator.random(length) < 0.5
        supervised[0] = False
        return Example(generator.integers(0, 99, length).astype(np.int32), supervised)


def test_packing_by_hand() -> None:
    batch = pack([row([5, 6, 7], [0, 0, 1]), row([8], [0]), row([9, 4], [0, 1])], [30, 10, 20])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.bounds == (0, 3, 4, 6)
    assert batch.predict_from.tolist() == [1, 4]
    assert batch.targets.tolist() == [7, 4]
    assert batch.target_rows.tolist() == [0, 2]
    assert batch.last_tokens.tolist() == [2, 3, 5]
    assert batch.sample_ids == (30, 10, 20)
    assert (batch.num_rows, batch.num_tokens, batch.num_targets) == (3, 6, 2)
    assert all(tensor.dtype == torch.int64 for _, tensor in batch._tensors())


def test_targets_are_the_tokens_after_their_positions() -> None:
    rows = [Rows()[number] for number in range(20)]
    batch = pack(rows, range(20))
    assert torch.equal(batch.input_ids[batch.predict_from + 1], batch.targets)
    for number, one in enumerate(rows):
        assert batch.targets[batch.target_rows == number].tolist() == one.input_ids[one.supervised].tolist()
        assert batch.input_ids[slice(*batch.bounds[number : number + 2])].tolist() == one.input_ids.tolist()


@pytest.mark.parametrize("rows", [[], [row([], [])], [row([1, 2], [1, 0])]])
def test_rows_that_cannot_be_packed_are_refused(rows: list[Example]) -> None:
    with pytest.raises(ValueError, match="first token is not a target"):
        pack(rows, range(len(rows)))


def test_padding_by_hand() -> None:
    inputs, index = padded(pack([row([5, 6, 7], [0, 0, 1]), row([8, 9], [0, 1])], [0, 1]), pad_id=77)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 77]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert inputs["input_ids"][index].tolist() == [5, 6, 7, 8, 9]


def test_moving_a_batch_moves_every_tensor() -> None:
    moved = pack([row([5, 6], [0, 1])], [0]).to("meta")
    assert {tensor.device.type for _, tensor in moved._tensors()} == {"meta"}
    assert moved.sample_ids == (0,)
