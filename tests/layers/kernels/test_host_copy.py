"""Numbers come over as they are, however many there are, in both directions."""

from __future__ import annotations

import pytest
import torch

from kvtide.layers.kernels.host_copy import BLOCK, CTAS, host_copy


@pytest.mark.parametrize("count", [1, 15, BLOCK, BLOCK + 1, BLOCK * CTAS + 5])
def test_numbers_go_to_the_device_and_back_and_no_others_are_written(
    count: int, device: torch.device
) -> None:
    values = torch.randint(
        -(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(count)
    )
    source, back = values.int(), torch.full((count + 8,), -5, dtype=torch.int32)
    if device.type == "cuda":
        source, back = source.pin_memory(), back.pin_memory()
    room = torch.full((count + 8,), -7, dtype=torch.int32, device=device)
    for _ in range(2):
        host_copy(source, room[:count])
        host_copy(room[:count], back[:count])
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(room[:count].cpu(), source) and (room[count:] == -7).all()
        assert torch.equal(back[:count], source) and (back[count:] == -5).all()
        source.neg_()  # What is there by now is carried the next time.
