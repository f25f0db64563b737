"""Stages and tensor ranks draft and accept the same tokens, and restore the draft's KV alike."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.rank_serving import Grid
from tests.engine.speculation import rank_drafting
from tests.engine.test_ranks import SHAPES, Shape
from tests.models import tiny_mtp
from tests.models.tiny import oracle
from tests.models.tiny_eagle3 import tiny_eagle3
from tests.worlds import check, play

MTP = {"mtp": "deepseek_v3-mtp", "mtp-v4": tiny_mtp.V4, "mtp-hot": "deepseek_v32-mtp"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, and what one rank says with them."""
    folder = tmp_path_factory.mktemp("one")
    for name in ("ngram", "eagle3"):
        oracle("llama").save_pretrained(folder / "models" / name)
    config = json.loads((folder / "models" / "eagle3" / "config.json").read_text())
    tiny_eagle3(config, folder / "models" / "draft", captures=(0, 1, 1))
    for kind, name in MTP.items():
        saved = folder / "models" / kind
        saved.mkdir()
        (saved / "config.json").write_text(json.dumps(tiny_mtp.config(name)))
        tensors = {key: each.contiguous().clone() for key, each in tiny_mtp.weights(name).items()}
        save_file(tensors, saved / "model.safetensors")
    torch.save(rank_drafting.expected(folder), folder / "expected")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_accepts_the_same(
    models: Path, shape: Shape, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(str(shape))
    for name in ("models", "expected"):
        (folder / name).symlink_to(models / name)
    kind = partial(Grid, stages=shape.stages)
    scenarios = rank_drafting.scenarios()
    reports = play(shape.stages * shape.tensor_ranks, folder, scenarios, kind)
    for name in scenarios:
        check(reports, name)
